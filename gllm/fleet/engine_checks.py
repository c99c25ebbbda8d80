"""Check that an engine can serve a router's requests."""

from gllm.messages.fleet import AnnounceEngine


def unfit_reason(announce: AnnounceEngine, model: str, model_hash: str, max_model_len: int) -> str:
    """Return why an engine cannot serve a router's requests; empty if it can.

    Args:
        announce: of the engine.
        model: of the router, for the text.
        model_hash: of the router's model.
        max_model_len: most tokens of prompt and output of the router's requests.
    """
    if announce.model_hash != model_hash:
        return (
            f"it serves {announce.model}, whose files differ from those of the router's model "
            f"{model}"
        )
    if announce.max_model_len < max_model_len:
        return (
            f"its maximum length is {announce.max_model_len} tokens, that of the router is "
            f"{max_model_len}: start the router with --max-model-len"
        )
    return ""
