"""Remove credentials from a run's files and logs; they are found by the name of a setting or the form of a text."""

import re
from typing import Any

HIDDEN = "<redacted>"

# The last words of a name, as in `hub_token`, `HF_TOKEN`, `X-Api-Key` and `dbPassword`
_CREDENTIAL = re.compile(
    r"(^|_)(token|jwt|bearer|auth|authorization|cookie|dsn|sig|signature|(secret|password|passwd|passphrase|pwd"
    r"|credential|(api|access|secret|private|account|auth|signing|encryption)_?key)s?)$"
)
# Words that make `..._token` no credential, but a part of a text or a unit
_TEXT_TOKEN = re.compile(
    r"(^|_)(eos|bos|pad|unk|sep|cls|mask|stop|start|end|eot|boi|eoi|image|video|audio|special|per|first|last|next|new)"
    r"_token$"
)
_WEBHOOK = re.compile(r"(^|_)(sinks?|(web)?hooks?(_ur[il]s?)?)$")

_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^\s\"'<>]+", re.I)
_PAIR = re.compile(
    r"""(?P<name>[\w.-]+)(?P<is>["']?\s*[=:]\s*["']?)(?P<value>((bearer|basic|token)\s+)?[^\s"',;&#})\]<]+)""", re.I
)
_SHAPES = re.compile(
    r"(?<![A-Za-z0-9])("
    r"hf_[A-Za-z0-9]{20,}|api_org_[A-Za-z0-9]{20,}"  # Hugging Face
    r"|sk-(?=[\w-]*\d)[\w-]{16,}|sk_(live|test)_\w{16,}"  # OpenAI, Anthropic, Stripe and others
    r"|wandb_v\d_\w{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|xox[a-z]-[\w-]{10,}|xapp-[\w-]{10,}|bot\d{6,}:[\w-]{20,}"  # Slack, Telegram
    r"|(AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{30,}|ya29\.[\w-]{20,}"  # Amazon, Google
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # JSON web tokens
    r"|(?<=bearer )(?=\S*\d)[\w.~+/=-]{12,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)"
    r")",
    re.I | re.S,
)


def redacted(value: Any, name: str = "") -> Any:
    """
    Return `value` with each credential in it replaced by `<redacted>`.

    These are replaced:

    - the values of keys such as `token`, `password` or `api_key`, in mappings and in texts like `token=...`
    - in a URL, the user and the password, and credentials in the query; in a webhook's URL also the path
    - text that looks like a token, such as `hf_...` or `sk-...`

    The values of `eos_token` and similar names are kept, since they are no credentials.

    Args:
        value: text, or a list, tuple or mapping of values. Other objects are returned as they are.
        name: name of the value. If it is that of a credential, such as `token`, the whole value is replaced, unless it
            is empty, None or a bool.
    """
    words = _words(name)
    if value is None or isinstance(value, bool) or value == "":
        return value
    if _is_credential(words):
        return HIDDEN
    if isinstance(value, str):
        return _redacted_text(value, _WEBHOOK.search(words) is not None)
    if isinstance(value, dict):
        return {redacted(key): redacted(item, str(key)) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(redacted(item, name) for item in value)
    return value


class HidesCredentials:
    """
    Extend `TrainingArguments`: hide credentials in `to_dict`, which trackers such as W&B and TensorBoard get.
    """

    def to_dict(self) -> dict[str, Any]:
        settings = super().to_dict()  # type: ignore[misc]
        # TrainingArguments hides every field that ends in `_token`, also where it holds no secret
        return redacted({**settings, **{name: getattr(self, name) for name in settings if name.endswith("_token")}})


class _PickledAs(str):
    """Hold a string with a credential, which is pickled as `shown`, a text without the credential."""

    shown: str

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return str, (self.shown,)


def pickled_without_credentials(args: Any) -> dict[str, Any]:
    """
    Return new values, by name, for the attributes of `args` that hold credentials.

    The new value of a string, such as the hub's token, still works, and is redacted only when it is pickled. In the
    new value of a list or mapping, the credentials are redacted at once.
    """
    changed: dict[str, Any] = {}
    for name, value in vars(args).items():
        shown = redacted(value, name)
        if shown is value or shown == value:
            continue
        changed[name] = shown
        if isinstance(value, str):
            changed[name] = _PickledAs(value)
            changed[name].shown = shown
    return changed


def _words(name: str) -> str:
    return re.sub(r"\W+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)).strip("_").lower()


def _is_credential(words: str) -> bool:
    return _CREDENTIAL.search(words) is not None and not _TEXT_TOKEN.search(words)


def _redacted_text(text: str, is_webhook: bool = False) -> str:
    text = _URL.sub(lambda match: _redacted_url(match[0], is_webhook), text)
    return _SHAPES.sub(HIDDEN, _PAIR.sub(_redacted_pair, text))


def _redacted_pair(match: re.Match) -> str:
    # As in "nats per token: 0.6709"; a longer row of digits may be a password
    is_number = re.fullmatch(r"-?(\d{1,5}|\d{1,5}\.\d{0,6}(e[+-]?\d+)?|inf|nan)[.%]?", match["value"])
    hide = _is_credential(_words(match["name"])) and not is_number
    value = HIDDEN if hide else _PAIR.sub(_redacted_pair, match["value"])  # which may be `//host/x?token=…` of a URL
    return f"{match['name']}{match['is']}{value}"


def _redacted_url(url: str, is_webhook: bool) -> str:
    scheme, rest = url.split("://", 1)
    place, path = re.fullmatch(r"([^/?#]*)(.*)", rest, re.S).groups()  # type: ignore[union-attr]
    user, at, host = place.rpartition("@")
    if at and (":" in user or scheme.lower().startswith("http")):
        user = HIDDEN
    if is_webhook or re.search(r"(^|\.)hooks?\.|webhook", host, re.I) or re.search(r"(^|/)(web)?hooks?/", path, re.I):
        path = path[:1] + HIDDEN if path[1:] else path
    # In a query `key` and `code` are credentials, too
    path = re.sub(r"(?<=[?&;])(key|code|[\w.-]*[-_]key)=[^&;#]+", rf"\1={HIDDEN}", path, flags=re.I)
    return f"{scheme}://{user}{at}{host}{path}"
