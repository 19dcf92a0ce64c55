from __future__ import annotations

from pathlib import Path

import pytest

from preble.config import GatewayConfig, ReplicaConfig, knobs
from preble.config.load import load
from preble.core.types import Role
from preble.errors import ConfigError
from support.scripts import script

URL = "http://127.0.0.1:8101"
PAGES = script("dev/settings_page.py")
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "configuration.md"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "preble.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_reference_page_is_what_the_code_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == PAGES.settings_page(), "run `make reference`"


def test_every_knob_has_a_meaning_and_a_reason_and_times_and_sizes_have_a_unit() -> None:
    for knob in knobs(GatewayConfig):
        about = PAGES.about(knob)
        assert about.text and about.why, knob.key
        assert about.unit or not knob.key.endswith(("_s", "_bytes")), knob.key


def test_defaults_need_only_a_replica() -> None:
    config = load(None, {}, {"replicas": [URL]})
    assert config == GatewayConfig(replicas=(ReplicaConfig(URL),))


def test_flags_override_the_environment_and_the_environment_overrides_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, f'replicas = ["{URL}"]\nport = 1\nhost = "a"\n[limits]\nmax_in_flight = 1\n')
    environ = {"PREBLE_PORT": "2", "PREBLE_LIMITS__MAX_IN_FLIGHT": "2", "PATH": "/bin"}
    config = load(path, environ, {"port": 3, "policy": None, "replicas": ()})
    assert (config.host, config.limits.max_in_flight, config.port) == ("a", 2, 3)


def test_replicas_are_urls_or_tables(tmp_path: Path) -> None:
    path = written(tmp_path, 'replicas = ["http://a:1/v1/", { url = "http://b:2", engine = "openai" }]')
    config = load(path, {}, {})
    assert config.replicas == (ReplicaConfig("http://a:1"), ReplicaConfig("http://b:2", engine="openai"))


def test_replicas_and_keys_in_the_environment_are_separated_by_commas() -> None:
    environment = {"PREBLE_REPLICAS": "http://a:1, http://b:2", "PREBLE_AUTH__API_KEYS": "k1,k2"}
    config = load(None, environment | {"PREBLE_API_KEY": "of commands"}, {})
    assert [replica.url for replica in config.replicas] == ["http://a:1", "http://b:2"]
    assert config.auth.api_keys == ("k1", "k2")


def test_keys_with_names_in_the_environment_stay_apart() -> None:
    """`alice=...` after a comma is a key, not a word about the one before."""
    digests = "a" * 64, "b" * 64
    named = f"alice=sha256:{digests[0]},bob=sha256:{digests[1]}"
    config = load(None, {"PREBLE_REPLICAS": "http://a:1", "PREBLE_AUTH__API_KEYS": named}, {})
    assert config.auth.api_keys == (f"alice=sha256:{digests[0]}", f"bob=sha256:{digests[1]}")


def test_what_follows_a_url_as_key_and_value_is_said_of_that_replica() -> None:
    more = "http://a:1,role=prefill,transfer_group=zone-1"
    wanted = (ReplicaConfig("http://a:1", role=Role.PREFILL, transfer_group="zone-1"), ReplicaConfig("http://b:2"))
    assert load(None, {"PREBLE_REPLICAS": f"{more},http://b:2"}, {}).replicas == wanted
    assert load(None, {}, {"replicas": (more, "http://b:2")}).replicas == wanted


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('polcy = "e2"', "unknown key 'polcy'; did you mean 'policy'"),
        ("[limits]\nmax_inflight = 3", "did you mean 'limits.max_in_flight'"),
        ("[limit]\nmax_in_flight = 3", "unknown section [limit]; did you mean [limits]"),
        ("[server]\nport = 1", "unknown section [server]; sections: auth, "),
        ("[server]\nport = 1", "; before the first of them: engine, groups, "),
        ("port = 'x'", "port = 'x': Expected `int`"),
        ("port = 70000", "port = 70000: Expected `int` <= 65535"),
        ("[timeouts]\nidle_s = 0", "timeouts.idle_s = 0: Expected `float` > 0"),
        ('replicas = "http://a:1"', "give a list"),
        ('replicas = ["localhost:8000"]', "replicas: 'localhost:8000' is not a URL"),
        ('replicas = ["http://a:port"]', "replicas: 'http://a:port' is not a URL"),
        ('replicas = ["http://user:secret@a:1"]', "replicas: the URL of a has a user name or password"),
        ('replicas = [{ ulr = "http://a:1" }]', "unknown key 'ulr'; did you mean 'url'"),
        ('replicas = [{ engine = "vllm" }]', "missing required field `url`"),
        ('replicas = ["http://a:1,rle=decode"]', "unknown key 'rle'; did you mean 'role'"),
        ('replicas = ["http://a:1,role=encode"]', "Invalid enum value 'encode'"),
        ("replicas = [7]", "neither a URL nor a table"),
        ('replicas = ["http://a:1", "http://A:1/"]', "http://a:1 is given twice"),
        ("replicas = []", "no replica given"),
        ('replicas = ["http://a:1"]\n[health]\nretry_min_s = 9.0', "retry_min_s is larger"),
        ('replicas = ["http://a:1"]\npolicy = "e2?calm=2"', "need 1 <= calm <= threshold"),
        ('replicas = ["http://a:1"]\npolicy = "e2?calms=2"', "e2 has no setting 'calms'; it has: threshold, calm"),
        ('replicas = ["http://a:1"]\npolicy = "e2?calm=nan"', "e2 cannot use 'calm=nan': give a value such as 1.25"),
        ('replicas = ["http://a:1"]\npolicy = "e2?replicate=no"', "give a value such as True"),
        ('replicas = ["http://a:1"]\npolicy = "preble?calm=1"', "policy 'preble' has no settings"),
        ('replicas = ["http://a:1"]\npolicy = "best"', "unknown policy 'best'; choose one of preble, "),
        ("[decisions]\nlog_tokens = 'open'", "decisions.log_tokens = 'open'"),
        ("port =", "not valid TOML: Invalid value (at line 1, the last)"),
        (f"port = {'[' * 5000}", "not valid TOML: it is nested too deep"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place_and_the_remedy(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path, text), {}, {})
    assert said in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml.*cannot be read"):
        load(tmp_path / "none.toml", {}, {})


def test_a_misspelt_environment_variable_is_refused_and_a_foreign_one_is_not() -> None:
    with pytest.raises(ConfigError, match="PREBLE_POLICI is not known; did you mean PREBLE_POLICY"):
        load(None, {"PREBLE_POLICI": "e2"}, {"replicas": [URL]})
    assert load(None, {"PREBLE_LOG_LEVEL": "debug"}, {"replicas": [URL]}).policy == "preble"


def test_an_unknown_flag_is_refused() -> None:
    with pytest.raises(ConfigError, match="flags: unknown key 'tokeniser'; did you mean 'tokenizer'"):
        load(None, {}, {"replicas": [URL], "tokeniser": "x"})
