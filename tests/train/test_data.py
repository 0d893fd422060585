"""Sources, loss masks, packing, the order of rows, and resuming in the middle of an epoch."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from checkpoint import CHAT_TEMPLATE, VOCAB, save_tiny, tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint
from speclight.modules.batch import RaggedBatch
from speclight.train.data import (
    Document,
    PackedDataset,
    RowSampler,
    Source,
    TextBatch,
    TextDataModule,
    draft_vocabulary,
    encode_row,
    pack,
    read_documents,
    read_prompts,
    read_rows,
)
from support import tiny_lm

EOS = 1
TURNS = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}</s> {% endfor %}"
OPENING = "{% if add_generation_prompt %}[assistant]{% endif %}"
MARKED = (
    "{% for m in messages %}[{{ m['role'] }}]{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}</s>{% endgeneration %}{% else %}{{ m['content'] }}</s>{% endif %} {% endfor %}"
)
# like Qwen3's: what was thought is only kept in the last turn, which also has an empty thought when there was none
THINKING = (
    "{% for m in messages %}[{{ m['role'] }}]{% set said = m['content'].split(')')[-1] %}"
    "{% if m['role'] == 'assistant' and loop.last %}({{ m['content'][1:].split(')')[0] if ')' in m['content'] }})"
    "{% endif %}{{ said }}</s> {% endfor %}"
)
TWO_TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": " first, ab "},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "second"},
]


def with_template(template: str | None):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def learned(document: Document, tokenizer) -> list[str]:
    """The supervised stretches as text."""
    stretches, before = [], False
    for token, on in zip(tokenizer.convert_ids_to_tokens(list(document.token_ids)), document.supervised, strict=True):
        if on:
            stretches += [] if before else [""]
            stretches[-1] += token.replace("Ġ", " ")
        before = on
    return stretches


def write(path: Path, rows: list) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def documents_of(lengths: list[int], first: int = 2) -> list[Document]:
    """Texts whose tokens tell them apart: document i holds only the token first + i."""
    return [Document([first + i] * length, [True] * length, may_split=True) for i, length in enumerate(lengths)]


# --- what of a chat is supervised --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TURNS + OPENING, ["first, ab</s>", "second</s>"]),
        (MARKED, [" first, ab </s>", "second</s>"]),
        (CHAT_TEMPLATE, [" first, ab ", "second"]),  # has no end-of-turn token, and opens the next turn unasked
    ],
)
def test_only_what_the_assistant_says_is_supervised_in_both_its_turns(template: str, expected: list[str]) -> None:
    """Up to the end of turn, and without the space that the template puts behind it."""
    tokenizer = with_template(template)
    document = encode_row({"messages": TWO_TURNS}, tokenizer, {EOS})
    assert learned(document, tokenizer) == expected
    ids = tokenizer.apply_chat_template(TWO_TURNS, return_dict=True)["input_ids"]
    assert list(document.token_ids) == ids


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (("(why)one", "(so)two"), ["one</s>", "so)two</s>"]),
        (("one", "two"), ["one</s>", "two</s>"]),
    ],
)
def test_a_template_that_writes_early_turns_otherwise_is_followed(answers, expected: list[str]) -> None:
    """Here a chat's beginning is not how the chat begins: the difference of the two is not the turn."""
    tokenizer = with_template(THINKING)
    users = [{"role": "user", "content": "q"}] * 2
    said = [{"role": "assistant", "content": answer} for answer in answers]
    messages = [turn for pair in zip(users, said, strict=True) for turn in pair]
    assert learned(encode_row({"messages": messages}, tokenizer, {EOS}), tokenizer) == expected


def test_an_empty_answer_is_an_end_of_turn() -> None:
    tokenizer = with_template(TURNS)
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]
    assert learned(encode_row({"messages": messages}, tokenizer, {EOS}), tokenizer) == ["</s>"]


def test_marks_in_the_template_and_the_difference_agree() -> None:
    tokenizer = with_template(MARKED)
    plain = with_template(MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", ""))
    marked = encode_row({"messages": TWO_TURNS}, tokenizer, {EOS})
    assert marked == encode_row({"messages": TWO_TURNS}, plain, {EOS})


def test_a_text_is_supervised_whole_and_a_completion_without_its_prompt() -> None:
    tokenizer = tiny_tokenizer()
    text = encode_row({"text": "all of it"}, tokenizer)
    assert learned(text, tokenizer) == ["all of it</s>"] and text.may_split
    completion = encode_row({"prompt": "say b:", "completion": "b it is"}, tokenizer)
    assert learned(completion, tokenizer) == ["b it is</s>"] and not completion.may_split


def test_a_completion_does_not_change_the_tokens_of_its_prompt() -> None:
    """ "a" + "b" would be one token, but in serving the prompt is there first."""
    tokenizer = tiny_tokenizer()
    document = encode_row({"prompt": "a", "completion": "b"}, tokenizer)
    assert list(document.token_ids) == [*tokenizer("a").input_ids, *tokenizer("b").input_ids, EOS]
    assert list(document.supervised) == [False, True, True]


# --- sources -----------------------------------------------------------------------------------------------------


def test_rows_come_in_order_from_files_folders_and_under_other_names(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", [{"content": "third"}])
    first = write(tmp_path / "a.jsonl", [{"content": "first", "id": 7}, "\n", {"content": "second"}])
    renamed = {"text": "content"}
    assert list(read_rows(Source(str(tmp_path), fields=renamed))) == [
        (f"{first}:1", {"id": 7, "text": "first"}),
        (f"{first}:3", {"text": "second"}),
        (f"{tmp_path / 'b.jsonl'}:1", {"text": "third"}),
    ]
    assert [row for _, row in read_rows(Source(str(tmp_path), fields=renamed, limit=1))] == [{"id": 7, "text": "first"}]


def test_parquet_and_saved_datasets_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data = datasets.Dataset.from_list([{"text": "one"}, {"text": "two"}])
    data.to_parquet(str(tmp_path / "data.parquet"))
    data.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"held": data}).save_to_disk(str(tmp_path / "splits"))
    for path, split, place in (
        ("data.parquet", "train", "data.parquet"),
        ("saved", "train", "saved[train]"),
        ("splits", "held", "splits[held]"),
    ):
        rows = list(read_rows(Source(str(tmp_path / path), split=split)))
        assert rows == [(f"{tmp_path / place}:1", {"text": "one"}), (f"{tmp_path / place}:2", {"text": "two"})]
    with pytest.raises(ValueError, match=r"splits \(split 'train'\) cannot be loaded"):
        list(read_rows(Source(str(tmp_path / "splits"))))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{broken\n", "not valid JSON"),
        ("[1]\n", "a row must be a JSON object, got list"),
        ({"id": 1, "prompt": "only"}, "exactly one of text, messages, prompt .* got the fields id, prompt"),
        ({"other": 1}, "got the fields other; `fields` renames others"),
        ({"text": "a", "messages": TWO_TURNS}, "got text and messages"),
        ({"text": 3}, "text must be a string, got 3"),
        ({"prompt": "a", "completion": ["b"]}, r"completion must be a string, got \['b'\]"),
        ({"messages": []}, "messages must be a non-empty list"),
        ({"messages": [{"role": "user"}]}, r"messages must be .* got \{'role': 'user'\}"),
        ({"messages": TWO_TURNS[:2]}, "messages has no turn of the assistant"),
        ({"messages": [{"role": "tool", "content": "x"}, TWO_TURNS[2]]}, "messages cannot be written .* no tools here"),
    ],
)
def test_a_wrong_row_is_named_by_file_line_and_field(tmp_path: Path, row, message: str) -> None:
    path = write(tmp_path / "rows.jsonl", [{"text": "fine"}, "\n", row])
    template = "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}" + TURNS
    with pytest.raises(ValueError, match=rf"rows\.jsonl:3: .*{message}"):
        list(read_documents(str(path), with_template(template), {EOS}))


def test_messages_without_a_chat_template_are_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", [{"messages": TWO_TURNS}])
    with pytest.raises(ValueError, match=r"chats\.jsonl:1: messages need a chat template.*chat_template"):
        list(read_documents([str(path)], with_template(None), {EOS}))
    assert list(read_documents(str(write(path, [{"text": "raw text works"}])), with_template(None), {EOS}))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: list(read_rows(Source("nowhere.jsonl"))), r"nowhere\.jsonl does not exist; a source is a \.jsonl"),
        (lambda: list(read_rows(Source(__file__))), "cannot be read; a source is"),
        (lambda: Source("a.jsonl", fields={"txt": "content"}), "fields of a.jsonl must be of text, messages"),
        (lambda: Source("a.jsonl", limit=0), "limit of a.jsonl must be at least 1"),
        (lambda: PackedDataset([], 1), "row_tokens must be at least 2"),
        (lambda: TextDataModule("m", "a.jsonl", batch_rows=0), "batch_rows must be at least 1"),
    ],
)
def test_a_wrong_setting_is_named(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_renamed_field_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"body": "x"}])
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: there is no field 'content'; the row has body"):
        list(read_rows(Source(str(path), fields={"text": "content"})))


# --- packing -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 9), max_size=40))
def test_packing_keeps_everything_once_and_no_two_rows_could_be_one(lengths: list[int]) -> None:
    rows = pack(lengths, 9)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    filled = sorted(sum(lengths[index] for index in row) for row in rows)
    assert all(0 < size <= 9 for size in filled)
    assert len(filled) < 2 or filled[0] + filled[1] > 9


def test_documents_of_a_row_do_not_see_each_other_and_each_begins_at_position_zero() -> None:
    """Fails when a packed row is run as one sequence: change document 1, and the logits of document 2 change."""
    lengths, model = [5, 7, 4], tiny_lm(fast=False)

    def run(first_token: int) -> tuple[torch.Tensor, RaggedBatch]:
        documents = documents_of(lengths)
        changed = [Document([first_token] * 5, [True] * 5), *documents[1:]]
        (row,) = PackedDataset(changed, sum(lengths))
        batch = RaggedBatch.build(TextBatch.collate([row]).items(), None)
        return model(batch), batch

    with torch.no_grad():
        (before, batch), (after, _) = run(40), run(41)
        alone = model(RaggedBatch.build(TextBatch.collate([documents_of(lengths)[1:2]]).items(), None))
    assert batch.positions.tolist() == [*range(5), *range(7), *range(4)]
    assert torch.equal(before[5:], after[5:]) and not torch.equal(before[:5], after[:5])
    torch.testing.assert_close(before[5:12], alone)


def test_a_batch_tells_each_token_what_comes_next_in_its_own_document() -> None:
    rows = [
        [Document([5, 6, 7], [False, False, True]), Document([8, 9], [False, True])],
        [Document([10, 11], [False, False])],
    ]
    batch = TextBatch.collate(rows)
    assert batch.documents == [[5, 6, 7], [8, 9], [10, 11]]
    assert batch.next_ids.tolist() == [6, 7, 0, 9, 0, 11, 0]
    assert batch.mask.tolist() == [False, True, False, True, False, False, False]


def test_long_texts_are_split_into_equal_pieces_and_only_their_first_tokens_are_not_predicted() -> None:
    document = Document(list(range(2, 13)), [True] * 11, may_split=True)
    dataset = PackedDataset([document], row_tokens=4)
    pieces = sorted(list(piece.token_ids) for row in dataset for piece in row)
    assert pieces == [[2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert dataset.summary.cut == 0 and dataset.summary.supervised == 11 - 3


def test_long_chats_are_cut_off_at_the_end_and_left_out_when_no_answer_remains() -> None:
    late = Document([9] * 8, [False] * 7 + [True])
    early = Document([3, 4, 5, 6, 7, 8], [False, True, True, False, True, True])
    dataset = PackedDataset([late, early], row_tokens=4)
    ((kept,),) = dataset
    assert list(kept.token_ids) == [3, 4, 5, 6] and list(kept.supervised) == [False, True, True, False]
    summary = dataset.summary
    assert (summary.documents, summary.cut, summary.unsupervised, summary.supervised) == (2, 6, 1, 2)
    assert "6 tokens cut off; 1 without a supervised token" in str(summary)


@pytest.mark.parametrize(
    "documents",
    [[], [Document([5, 6], [False, False])], [Document([5], [True], may_split=True)], [Document([], [])]],
)
def test_data_without_anything_supervised_is_refused(documents: list[Document]) -> None:
    with pytest.raises(ValueError, match=r"nothing of data\.train would be supervised"):
        PackedDataset(documents, 8, "data.train")


def test_the_draft_vocabulary_is_the_most_frequent_of_the_supervised_tokens_and_always_the_end_tokens() -> None:
    """Token 9 is the most frequent of all but never supervised; the end tokens do not occur."""
    documents = [
        Document([9, 9, 9, 9, 3, 3, 4], [False] * 4 + [True] * 3),
        Document([4, 3, 5], [True, True, True]),  # its first token is never predicted
        Document([8, 5, 4], [False, True, True]),
    ]
    dataset = PackedDataset(documents, 16)
    assert draft_vocabulary(dataset, 1, 20).tolist() == [3]
    assert draft_vocabulary(dataset, 3, 20, {0, 19}).tolist() == [0, 3, 19]
    assert draft_vocabulary(dataset, 5, 20, {0, 19}).tolist() == [0, 3, 4, 5, 19]
    assert draft_vocabulary(dataset, 4, 20).tolist() == [3, 4, 5, 9]  # filled up with what the data has at all
    assert draft_vocabulary(dataset, 20, 20).tolist() == list(range(20))
    for k, vocab in ((21, 20), (1, 20), (4, 9)):
        with pytest.raises(ValueError, match=r"k must be|vocab_size must be"):
            draft_vocabulary(dataset, k, vocab, {0, 8})


# --- the order of rows -------------------------------------------------------------------------------------------


def numbered(count: int) -> PackedDataset:
    """Row i holds one document of two tokens 2 + i."""
    return PackedDataset(documents_of([2] * count), 2)


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    seeds_and_epochs = [(seed, epoch) for seed in range(3) for epoch in range(3)]
    orders = {(seed, epoch): RowSampler(numbered(10), seed=seed).order(epoch) for seed, epoch in seeds_and_epochs}
    assert len(set(map(tuple, orders.values()))) == 9  # two of 9 random orders of 10 are equal with probability 1e-5
    torch.manual_seed(99)
    assert RowSampler(numbered(10), seed=1).order(2) == orders[1, 2]
    assert RowSampler(numbered(4), shuffle=False).order(7) == [0, 1, 2, 3]


@pytest.mark.parametrize(("rows", "world"), [(8, 2), (7, 2), (5, 4), (1, 3)])
def test_ranks_together_take_what_one_process_would_and_fill_up_without_counting(rows: int, world: int) -> None:
    """Fails as a mean over padded rows: 5 rows on 2 ranks would count 6."""
    dataset = numbered(rows)
    alone = RowSampler(dataset, seed=3).order(1)
    shares = [RowSampler(dataset, world, rank, seed=3).order(1) for rank in range(world)]
    together = [index for step in zip(*shares, strict=True) for index in step]
    assert together[:rows] == alone and len(together) == math.ceil(rows / world) * world
    batch = TextBatch.collate([dataset[index] for index in together])
    assert int(batch.mask.sum()) == dataset.summary.supervised
    assert Counter(batch.next_ids[batch.mask].tolist()) == Counter(dataset.token_ids[dataset.supervised].tolist())


def loader_of(folder: Path, rows: int = 10, seed: int = 5, **settings) -> TextDataModule:
    path = write(folder / "rows.jsonl", [{"text": chr(ord("A") + index) * 3} for index in range(rows)])
    if not (folder / "model").exists():
        save_tiny(folder / "model")
    return TextDataModule(str(folder / "model"), str(path), row_tokens=4, batch_rows=1, seed=seed, **settings)


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_loader_resumed_in_mid_epoch_goes_on_with_the_remaining_batches_in_order(tmp_path: Path, epoch: int) -> None:
    """In a new process with another global seed. In a later epoch it must not be the first epoch's order."""

    def fresh() -> TextDataModule:
        data = loader_of(tmp_path)
        data.setup("fit")
        return data

    data = fresh()
    loader = data.train_dataloader()
    loader.sampler.set_epoch(epoch)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    state = data.state_dict()
    rest = [batch.documents for batch in batches]
    torch.manual_seed(12345)
    resumed = fresh()
    resumed.load_state_dict(json.loads(json.dumps(state)))
    found = [batch.documents for batch in resumed.train_dataloader()]
    assert len(rest) == 6 and found == rest


class Recorder(pl.LightningModule):
    """Sees batches, and has a weight that depends on their order."""

    def __init__(self, asks_for_steps: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(VOCAB))
        self.asks_for_steps = asks_for_steps
        self.seen: list[list[list[int]]] = []

    def training_step(self, batch: TextBatch, _: int) -> torch.Tensor:
        self.seen.append(batch.documents)
        labels = batch.next_ids[batch.mask]
        return torch.nn.functional.cross_entropy(self.weight.expand(len(labels), -1), labels)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), 0.1)
        if not self.asks_for_steps:
            return optimizer
        steps = int(self.trainer.estimated_stepping_batches)
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)]


def fit(folder: Path, module: Recorder, save: bool, ckpt_path: Path | None = None, **settings) -> Recorder:
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=3,
        callbacks=[saver] if save else None,
        logger=False,
        enable_checkpointing=save,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(module, datamodule=loader_of(folder), ckpt_path=ckpt_path)
    return module


@pytest.mark.parametrize(("asks_for_steps", "accumulate"), [(False, 1), (True, 1), (True, 2)])
def test_a_run_resumed_by_the_trainer_sees_the_same_batches_and_ends_with_the_same_bits(
    tmp_path: Path, asks_for_steps: bool, accumulate: int
) -> None:
    """From the middle of the first and of a later epoch, and from an epoch's end. Asking for the number of steps makes
    Lightning build its loader before the checkpoint's state is there, and forget the state.
    """
    pl.seed_everything(1)
    settings = {"accumulate_grad_batches": accumulate}
    whole = fit(tmp_path, Recorder(asks_for_steps), save=True, **settings)
    assert len(whole.seen) == 30 and whole.seen[:10] != whole.seen[10:20]
    for batches in (4, 10, 14, 20):
        pl.seed_everything(2)
        ckpt_path = tmp_path / f"step={batches // accumulate}.ckpt"
        resumed = fit(tmp_path, Recorder(asks_for_steps), save=False, ckpt_path=ckpt_path, **settings)
        assert resumed.seen == whole.seen[batches:], f"after {batches} batches"
        assert torch.equal(resumed.weight, whole.weight), f"after {batches} batches"


def test_resuming_on_other_data_is_refused(tmp_path: Path) -> None:
    data = loader_of(tmp_path)
    data.setup("fit")
    iter(data.train_dataloader())
    other = loader_of(tmp_path, rows=9)
    other.setup("fit")
    other.load_state_dict(data.state_dict())
    with pytest.raises(ValueError, match=r"data\.train or row_tokens differs from what the checkpoint was trained on"):
        other.train_dataloader()


# --- the module --------------------------------------------------------------------------------------------------


def test_the_module_reads_what_its_stage_needs_with_the_models_tokenizer_and_end_tokens(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", eos_token_id=7)
    train = write(tmp_path / "train.jsonl", [{"text": "some text"}])
    val = write(tmp_path / "val.jsonl", [{"messages": TWO_TURNS}])
    template = tmp_path / "chat.jinja"
    template.write_text(TURNS)
    data = TextDataModule(str(tmp_path / "model"), str(train), str(val), row_tokens=128, chat_template=str(template))
    data.setup("validate")
    assert data.eos_token_ids == {1, 7} and set(data.datasets) == {"val"}
    data.setup("fit")
    assert set(data.datasets) == {"train", "val"}
    (batch,) = data.val_dataloader()
    assert learned(Document(batch.documents[0][1:], batch.mask.tolist()[:-1]), data.tokenizer) == [
        "first, ab</s>",
        "second</s>",
    ]
    with pytest.raises(ValueError, match=r"data\.test must be given for `test`"):
        data.setup("test")


def test_prompts_for_validation_are_read_apart_and_checked(tmp_path: Path) -> None:
    path = write(tmp_path / "prompts.jsonl", [{"prompt": "one", "id": 4}, {"messages": TWO_TURNS[:2]}])
    assert read_prompts(path, chat=True) == ["one", TWO_TURNS[:2]]
    assert read_prompts(path, chat=False, limit=1) == ["one"]
    with pytest.raises(ValueError, match=r"prompts\.jsonl:2: messages need a chat template"):
        read_prompts(path, chat=False)
    with pytest.raises(ValueError, match=r"prompts\.jsonl:1: a validation prompt cannot have settings of its own"):
        read_prompts(write(path, [{"prompt": "one", "temperature": 0.5}]), chat=True)
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(write(path, []), chat=True)
