"""lm-eval's tokenizer of a server, which asks for /tokenizer_info."""

import asyncio

import pytest

from tests.support.http.scripted_server import DEMO, scripted_server


def used(url: str) -> tuple[object, ...]:
    """Return what lm-eval knows of a server's tokenizer."""
    # Takes seconds to import, in every process that collects the tests.
    from lm_eval.utils import RemoteTokenizer

    made = RemoteTokenizer(url, max_retries=1)
    messages = [{"role": "user", "content": "Hi"}]
    return made.eos_token, made.eos_token_id, made.pad_token, made.apply_chat_template(messages)


@pytest.mark.full
async def test_lm_eval_finds_the_tokenizer() -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(DEMO)
    async with scripted_server() as server:
        url = str(server.client.make_url("/v1/completions"))
        eos, eos_id, pad, prompt = await asyncio.to_thread(used, url)
        info = await (await server.client.get("/tokenizer_info")).json()
    assert (eos, eos_id, pad) == (
        reference.eos_token,
        reference.eos_token_id,
        reference.pad_token,
    )
    messages = [{"role": "user", "content": "Hi"}]
    assert prompt == reference.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    assert info["model_max_length"] == server.engine.max_model_len
