"""`kv_transfer_params` of vLLM's routers, in the form of vLLM's NixlConnector.

The router sends a request for one token with `do_remote_decode` to the prefill engine. It copies
`kv_transfer_params` of the response to the request for the decode engine.
"""

from typing import Any

from gllm.frontend.answer_writer import WholeAnswerWriter
from gllm.frontend.fields.generation import HandoffFields
from gllm.frontend.handoffs.sides import (
    DecodeHandoff,
    HandoffContext,
    HandoffSubmitter,
    PrefillHandoff,
)
from gllm.frontend.response_schemas import KvTransferParams
from gllm.options.field_types import FieldError

FIELD = "kv_transfer_params"


def parse_kv_transfer_params(
    fields: HandoffFields, context: HandoffContext, writer: WholeAnswerWriter
) -> HandoffSubmitter | None:
    """Return the object that runs a request as the prefill or decode engine of vLLM's router.

    `do_remote_decode` of `kv_transfer_params` selects prefill, `do_remote_prefill` decode. The
    decode engine reads the KV grant in `remote_engine_id`; the prefill engine sets
    `writer.transfer_params`.

    Args:
        fields: Request fields with `kv_transfer_params`.
        context: State of the engine's KV transfers over HTTP.
        writer: Formats the response; the prefill engine's has `kv_transfer_params`.

    Returns:
        None if the field selects neither.

    Raises:
        FieldError: The field is invalid.
    """
    params = fields.kv_transfer_params or {}
    is_prefill = _read_flag(params, "do_remote_decode")
    is_decode = _read_flag(params, "do_remote_prefill")
    if is_prefill and is_decode:
        raise FieldError(
            FIELD,
            f"{FIELD} has do_remote_decode and do_remote_prefill: an engine has one half of a "
            "hand-off, so set one of them to false",
        )
    if is_prefill:

        def publish(grant: str) -> None:
            writer.transfer_params = to_transfer_params(grant)

        publish("")
        return PrefillHandoff(context, publish)
    if not is_decode:
        return None
    grant = params.get("remote_engine_id")
    if not isinstance(grant, str):
        raise FieldError(
            FIELD,
            f"{FIELD}.remote_engine_id is no text: pass on {FIELD} of the prefill engine's "
            "answer unchanged",
        )

    async def read_grant() -> str:
        return grant

    return DecodeHandoff(context, read_grant)


def to_transfer_params(grant: str) -> KvTransferParams | None:
    """Return `kv_transfer_params` of a prefill engine's response, for vLLM's router.

    Args:
        grant: Signed text that permits the decode engine to fetch the KV blocks; it becomes
            `remote_engine_id`. Empty if the engine keeps no KV blocks.

    Returns:
        None for an empty grant.
    """
    if not grant:
        return None
    return KvTransferParams(
        do_remote_prefill=True,
        do_remote_decode=False,
        remote_engine_id=grant,
        remote_block_ids=[],
        remote_host=None,
        remote_port=None,
    )


def _read_flag(params: dict[str, Any], name: str) -> bool:
    """Return a member of the parameters. Raises FieldError."""
    value = params.get(name)
    if value is not None and not isinstance(value, bool):
        raise FieldError(FIELD, f"{FIELD}.{name} is {value!r:.200}, but has to be true or false")
    return bool(value)
