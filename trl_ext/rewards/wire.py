"""Write requests to score servers, and read the answers, for each API. All functions here are pure."""

from typing import Any, Literal, NamedTuple

from .service import ServiceError

API = Literal["trl-ext", "vllm-classify", "vllm-score", "tei"]
PATHS = {"trl-ext": "/score", "vllm-classify": "/classify", "vllm-score": "/score", "tei": "/predict"}


class Row(NamedTuple):
    """Hold a prompt and its answer, and the `text` that a classifier reads for both."""

    prompt: Any
    completion: Any
    finished: bool | None
    text: str = ""
    is_templated: bool = False


def request_of(api: str, rows: list[Row], model: str | None, logits: bool) -> dict[str, Any]:
    """
    Return the body of a request that scores these rows.

    Args:
        api: one of `API`.
        rows: the answers to score.
        model: name of the model; a server that has another one refuses the request. None accepts any model.
        logits: ask for the model's output without sigmoid or softmax. `"trl-ext"` ignores it.
    """
    named = {"model": model} if model else {}
    match api:
        case "trl-ext":
            finished = [row.finished for row in rows]
            return named | {
                "prompts": [row.prompt for row in rows],
                "completions": [row.completion for row in rows],
                "finished": None if None in finished else finished,
            }
        case "vllm-classify":
            bare = not any(row.is_templated for row in rows)  # a chat template adds its own special tokens
            texts = [row.text for row in rows]
            return named | {"input": texts, "use_activation": not logits, "add_special_tokens": bare}
        case "vllm-score":
            pairs = {"text_1": [row.prompt for row in rows], "text_2": [row.completion for row in rows]}
            return named | pairs | {"use_activation": not logits}
        case _:
            # TEI would read a flat list of texts as one pair
            return {"inputs": [[row.text] for row in rows], "raw_scores": logits, "truncate": False}


def scores_in_answer(api: str, answer: Any, count: int, label: int | str | None) -> list[Any]:
    """
    Return the score of each row from a server's answer, in order, without checking that it is a number.

    Raises:
        ServiceError: the answer does not have the form of `api`, or does not have `count` scores; or the model has no
            label `label`, or several labels and `label` is None.
    """
    try:
        match api:
            case "trl-ext":
                scores = answer["scores"]
            case "vllm-classify":
                scores = [_of_label(item["probs"], label) for item in _in_order(answer["data"])]
            case "vllm-score":
                scores = [item["score"] for item in _in_order(answer["data"])]
            case _:
                scores = [_of_name(item, label) for item in answer]
        if not isinstance(scores, list):
            raise TypeError
    except (LookupError, TypeError, AttributeError) as error:
        raise ServiceError(f"the answer does not have the format of api={api!r}: {repr(answer)[:120]}") from error
    if len(scores) != count:
        raise ServiceError(f"the server returned {len(scores)} scores for {count} completions")
    return scores


def weights_in_answer(answer: Any) -> str | None:
    """Return which weights `trl-ext serve-reward` says in its answer that it serves; None if it does not say."""
    weights = answer.get("identity") if isinstance(answer, dict) else None
    return weights if isinstance(weights, str) and weights.isprintable() and len(weights) <= 100 else None


def _in_order(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort the entries of an answer by `index`; raise a `LookupError` unless each index from 0 on occurs once."""
    found = {item["index"]: item for item in items}
    if sorted(found) != list(range(len(items))):
        raise LookupError
    return [found[i] for i in range(len(items))]


def _of_label(numbers: list[Any], label: int | str | None) -> Any:
    if label is None and len(numbers) != 1:
        raise ServiceError(f"the model has {len(numbers)} labels: give the index of one as `label`")
    return numbers[int(label or 0)]


def _of_name(predictions: list[dict[str, Any]], label: int | str | None) -> Any:
    by_name = {item["label"]: item["score"] for item in predictions}  # TEI sorts by score: an index would mean nothing
    if label is None and len(by_name) != 1:
        raise ServiceError(f"the model has the labels {', '.join(sorted(by_name))[:120]}: give one as `label`")
    if label is not None and label not in by_name:
        raise ServiceError(f"the model has no label {label!r}; it has {', '.join(sorted(by_name))[:120]}")
    return by_name[label] if label is not None else next(iter(by_name.values()))
