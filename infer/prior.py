PRIOR: dict[str, str] = {}
