"""The real model that tests marked `model` share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def smollm2(request: pytest.FixtureRequest) -> tuple[str, str]:
    """(.gguf file of SmolLM2-135M-Instruct, folder for its conversion, kept between runs); skips without the wheel."""
    from speclight.infer.demo import demo_model

    try:
        path = demo_model()
    except ValueError as error:
        pytest.skip(str(error))
    assert request.config.cache is not None
    return str(path), str(request.config.cache.mkdir("smollm2"))
