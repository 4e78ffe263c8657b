"""What counts as a credential, and that a credential does not decide whether two runs are the same."""

import copy
import pickle

from tests.tiny import tiny_config
from trl_ext.runs.redaction import HIDDEN, pickled_without_credentials, redacted
from trl_ext.upstream.statements import temporarily

HF = "hf_" + "aB3dE5gH7jK9mN1pQ3sT5vX7zA9cE1gH3j"

LEAKS = [  # (name, value, the part that must be hidden)
    ("token", 12345, "12345"),
    ("apiKey", "plain", "plain"),
    ("AWS_SECRET_ACCESS_KEY", "plain", "plain"),
    ("db.password", "plain", "plain"),
    ("model_init_kwargs", {"token": "plain", "headers": {"X-Api-Key": "other"}}, "plain"),
    ("model_init_kwargs", {"proxies": {"https": "http://me:plain@proxy:8080"}}, "plain"),
    ("headers", {"Authorization": "Bearer plain"}, "plain"),
    ("headers", [("Authorization", HF)], HF),
    ("credentials", {"user": "plain"}, "plain"),
    ("sinks", ["log", "https://example.com/T0/B0/plain"], "plain"),
    ("webhook_url", "https://example.com/plain?x=1", "plain"),
    ("anything", "https://hooks.slack.com/services/T00/B00/plain", "plain"),
    ("anything", "https://discord.com/api/webhooks/1/plain", "plain"),
    ("dataset_name", "https://me:plain@host/data.jsonl", "plain"),
    ("dataset_name", "https://plain@host/data.jsonl", "plain"),
    *(
        ("dataset_name", f"{scheme}host{path}?{name}=plain{more}", "plain")
        for scheme in ("https://", "s3://", "at: https://", "url=", "")
        for path in ("", "/x", "/a:b/c=d/data.jsonl")
        for name in ("token", "api_key", "sig", "X-Amz-Signature", "access_token", "password")
        for more in ("", "&v=1", "#part")
    ),
    *(("dataset_name", f"https://host?{name}=plain&v=1", "plain") for name in ("key", "code", "subscription-key")),
    ("webhook_url", "https://example.com?plain", "plain"),
    ("anything", "https://webhook.example/plain", "plain"),
    ("run_name", f"my run {HF}", HF),
    ("run_name", "sk-ant-api03-plain1234567890", "plain1234567890"),
    ("note", "the header is Authorization: Bearer plain, as ever", "plain"),
    ("note", "token=plain", "plain"),
    ("note", '{"api_key": "plain"}', "plain"),
    ("note", str({"password": "plain"}), "plain"),
    ("note", {HF: 1}, HF),
    ("note", "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.plain", "plain"),
    ("note", "xoxb-1234567890-plain", "plain"),
    ("note", "sent with bearer plain1234567890", "plain"),
    ("note", "-----BEGIN " + "RSA PRIVATE KEY-----\nplain\nother\n-----END RSA PRIVATE KEY-----", "plain"),
    *(
        ("note", f"with {start}{'aB3dE5gH7jK9mN1p' * 2}", "aB3dE5gH7jK9mN1p")
        for start in (
            *("api_org_", "sk_live_", "wandb_v1_", "ghp_", "github_pat_", "glpat-", "xapp-", "bot123456:", "AIza"),
            *("ya29.",),
        )
    ),
    *(("note", f"with {start}{'A1B2C3D4' * 2}", "C3D4") for start in ("AKIA", "ASIA")),
]
KEPT = [
    ("eos_token", "</s>"),
    ("stop_token_id", 5),
    ("token", None),
    ("token", ""),
    ("token", True),
    ("max_tokens", 12),
    ("stop_tokens", ["a", "b"]),
    ("unit", "nats per token: 3"),
    ("unit", "per token: 0.6709, bound 1; per token: -1.5e-05; per token: inf."),
    ("sinks", ["log", "jsonl", "wandb"]),
    ("keys", {"kl": "objective/kl"}),
    ("model_name_or_path", "Qwen/Qwen2.5-0.5B-Instruct"),
    ("revision", "0123456789abcdef0123456789abcdef01234567"),
    ("dataset_name", "https://host/data.jsonl?version=2#part"),
    ("dataset_name", "ssh://git@host/data"),
    ("dataset_name", "https://host/@author/data"),
    ("lora_target_modules", ["q_proj", "k_proj"]),
    ("template", "{{ bos_token }}{% if x %}: {{ eos_token }}{% endif %}"),
    ("task", "ask-for-1-risk-adjusted-return-in-2025"),
    ("empty", {}),
]


def test_a_credential_is_hidden_and_hiding_twice_changes_nothing():
    for name, value, secret in LEAKS:
        before, shown = copy.deepcopy(value), redacted(value, name)
        assert secret not in str(shown) and HIDDEN in str(shown) and value == before, (name, value)
        assert redacted(shown, name) == shown


def test_other_values_stay():
    for name, value in KEPT:
        assert redacted(value, name) == value


def test_another_credential_is_the_same_run_and_another_setting_is_not():
    def run(**settings):
        return redacted({"dtype": "float32", **settings})

    same = [
        ({"model_init_kwargs": {"token": "a"}}, {"model_init_kwargs": {"token": "b"}}),
        ({"model_init_kwargs": {HF: 1}}, {"model_init_kwargs": {HF + "x": 1}}),
        ({"data": "https://host/d?v=1&token=a"}, {"data": "https://host/d?v=1&token=b"}),
        ({"data": "https://me:a@host/d"}, {"data": "https://me:b@host/d"}),
    ]
    another = [
        ({"model_init_kwargs": {"token": "a", "revision": "x"}}, {"model_init_kwargs": {"token": "a"}}),
        ({"data": "https://host/d?v=1&token=a"}, {"data": "https://host/d?v=2&token=a"}),
        ({"data": "https://me:a@host/d"}, {"data": "https://me:a@host/e"}),
        ({"empty": {}}, {"empty": None}),
    ]
    for a, b in same:
        assert run(**a) == run(**b)
    for a, b in another:
        assert run(**a) != run(**b)


def test_arguments_are_pickled_without_credentials_and_keep_them(tmp_path):
    args = tiny_config(tmp_path, hub_token=HF, model_init_kwargs={"token": "plain"}, run_name=f"r {HF}")
    changed = pickled_without_credentials(args)
    assert changed.keys() == {"hub_token", "model_init_kwargs", "run_name"}
    with temporarily(args, **changed):
        assert args.hub_token == HF and args.hub_token.startswith("hf_")  # an upload can still use it
        read = pickle.loads(pickle.dumps(args))
    assert (read.hub_token, read.model_init_kwargs, read.run_name) == (HIDDEN, {"token": HIDDEN}, f"r {HIDDEN}")
    assert type(args.hub_token) is str and args.model_init_kwargs == {"token": "plain"}
    assert read.learning_rate == args.learning_rate
    assert not {HF, "plain"} & set(map(str, args.to_dict().values())) and args.to_dict()["stop_token_id"] is None
