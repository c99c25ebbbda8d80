"""Check that an engine can serve a router's requests."""

from gllm.messages.fleet import AnnounceEngine
from gllm.scheduler.config import LOCAL_PRESETS


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


def preset_warning(announce: AnnounceEngine, preset: str | None) -> str:
    """Return how an engine's scheduling differs from that of a router's preset; empty if not.

    Args:
        announce: of the engine.
        preset: of the router; None without.
    """
    if preset is None or announce.policy in ("", LOCAL_PRESETS[preset].policy):
        return ""
    return (
        f"engine {announce.name} has policy {announce.policy}, but the router has --preset "
        f"{preset}: start the engine with --preset {preset}"
    )
