"""Predictors of output lengths by name: the values of `--length-predictor`."""

from gllm.scheduler.output_lengths import (
    LengthPredictor,
    LimitLengthPredictor,
    PromptLengthPredictor,
)

BY_MAX_TOKENS, BY_PROMPT, NEAREST = "by-max-tokens", "by-prompt", "nearest"
LENGTH_PREDICTORS = (BY_MAX_TOKENS, BY_PROMPT, NEAREST)
"""Names of the predictors that need no file."""
PREDICTOR_HELP = (
    "predicted output length of a request: by-max-tokens, the mean of the last outputs with a "
    "similar limit; by-prompt, of those after prompts of similar length; nearest, by the finished "
    "requests with the most similar prompts; or a file of `gllm profile lengths`"
)
"""Help text of `--length-predictor`, without its default."""


def check_length_predictor(text: str) -> str:
    """Return the name of a predictor, or the path of its file.

    Raises:
        ValueError: there is no such predictor, or the file is no length classifier.
    """
    if text not in LENGTH_PREDICTORS:
        make_length_predictor(text)
    return text


def make_length_predictor(text: str) -> LengthPredictor:
    """Return a new predictor of output lengths, without history.

    Args:
        text: its name, or the path of a file that `gllm profile lengths` wrote.

    Raises:
        ValueError: there is no such predictor, or the file is no length classifier.
    """
    if text == BY_MAX_TOKENS:
        return LimitLengthPredictor()
    if text == BY_PROMPT:
        return PromptLengthPredictor()
    # The others load numpy, which routers do without.
    if text == NEAREST:
        from gllm.routing.lengths.nearest import NearestPromptPredictor

        return NearestPromptPredictor()
    from gllm.routing.lengths.classifier import ClassifierPredictor, read_classifier

    try:
        return ClassifierPredictor(read_classifier(text))
    except OSError as error:
        raise ValueError(
            f"{text} is none of {', '.join(LENGTH_PREDICTORS)}, and no file that can be read: "
            f"{error.strerror}"
        ) from None
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from None
