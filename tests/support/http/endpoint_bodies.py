"""A body that works for every endpoint that takes one: a row for each."""

EXAMPLES: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions/render": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions/render": {"prompt": "Hi"},
    "/inference/v1/generate": {"token_ids": [72, 105], "sampling_params": {}},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi"},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/responses/compact": {"input": "Hi"},
    "/v1/embeddings": {"input": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [72, 105]},
    "/abort": {"abort_all": True},
    "/engines/{name}/role": {"role": "decode"},
    "/pd_role_switch": {"new_role": "decode"},
}

NEED_ROUTERS: dict[str, str] = {
    "/engines/{name}/role": "not_a_router",
    "/pd_role_switch": "role_switch_refused",
}
"""Code of the error with which an engine without routers answers an example."""
