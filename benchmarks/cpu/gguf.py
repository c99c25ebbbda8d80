"""Conversion of a model to GGUF, with llama.cpp's own converter.

The converter needs two overrides for the synthetic tokenizer. Run as `python -m benchmarks.cpu.gguf
SOURCES MODEL FILE TYPE` in gllm's environment; SOURCES is llama.cpp's folder.
"""

import importlib
import sys

PRE_TOKENIZER = "gpt-2"


def convert(sources: str, model: str, file: str, kind: str) -> None:
    """Write a GGUF file.

    Args:
        sources: llama.cpp's folder.
        model: The model's Hugging Face folder.
        file: Path of the GGUF file.
        kind: bf16 or q8_0.
    """
    sys.path.insert(0, sources)
    base = importlib.import_module("conversion.base").TextModel
    # The converter knows pre-tokenizers by a hash of a published tokenizer's output.
    base.get_vocab_base_pre = lambda _self, _tokenizer: PRE_TOKENIZER
    # The converter expects multi-token prediction layers otherwise.
    base.no_mtp = True
    # Qwen2's tries a SentencePiece model first, with a package that is not needed otherwise.
    importlib.import_module("conversion.qwen").Qwen2Model.set_vocab = base._set_vocab_gpt2
    sys.argv = ["convert_hf_to_gguf.py", model, "--outfile", file, "--outtype", kind]
    importlib.import_module("convert_hf_to_gguf").main()


if __name__ == "__main__":
    convert(*sys.argv[1:5])
