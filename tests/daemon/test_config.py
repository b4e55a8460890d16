"""Settings: precedence, origins, sizes, and refusals that say what to do."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from tierkv.daemon.config import DaemonConfig, check_machine, exact_tokens, load_config
from tierkv.daemon.gpu import device_index
from tierkv.daemon.limits import memory_limits
from tierkv.daemon.policy.lift import MemDecayLift
from tierkv.daemon.policy_settings import policy_of
from tierkv.daemon.setting_values import parse_size
from tierkv.errors import ConfigError
from tierkv.regions import Region

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _no_outside_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in DaemonConfig.model_fields:
        monkeypatch.delenv(f"TIERKV_{name.upper()}", raising=False)
    monkeypatch.delenv("TIERKV_CONFIG", raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tierkv.toml"


# Sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * 1024**3),
        ("512MiB", 512 * 1024**2),
        ("64 kib", 64 * 1024),
        ("1e9", 1_000_000_000),
        ("1.5GB", 1_500_000_000),
        ("1_000", 1000),
        ("4096", 4096),
        (4096, 4096),
        ("2TiB", 2 * 1024**4),
    ],
)
def test_sizes_are_read_in_binary_and_decimal_units(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["8G", "8Gi", "eight", "", "-1", "-4GiB", "1..5GiB", "8GiBs", "1e999", "1e307GiB", True, None, [1]],
)
def test_what_is_not_a_size_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"size|unit|more than"):
        parse_size(text)


def test_an_ambiguous_unit_gets_both_readings_offered() -> None:
    with pytest.raises(ConfigError, match="write 8GiB or 8GB"):
        load_config({"hbm": "8G"})


# Precedence ------------------------------------------------------------------------------------------------------


def test_the_command_line_beats_the_environment_beats_the_file_beats_the_default(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text('hbm = "1MiB"\nhost = "1MiB"\nobserve_every = 7\n')
    monkeypatch.setenv("TIERKV_HBM", "2MiB")
    monkeypatch.setenv("TIERKV_HOST", "2MiB")
    config, origins = load_config({"hbm": "3MiB"}, file)
    assert (config.hbm, config.host, config.observe_every, config.page_tokens) == (3 << 20, 2 << 20, 7, 16)
    assert origins["hbm"] == "command line"
    assert origins["host"] == "environment"
    assert origins["observe_every"] == f"file {file}"
    assert origins["page_tokens"] == "default"
    assert origins.keys() == DaemonConfig.model_fields.keys()


def test_a_flag_that_was_not_given_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERKV_HBM", "2MiB")
    assert load_config({"hbm": None}).config.hbm == 2 << 20


def test_the_environment_can_name_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("sink_tokens = 5\n")
    monkeypatch.setenv("TIERKV_CONFIG", str(file))
    assert load_config().config.sink_tokens == 5


def test_pins_of_a_stronger_source_replace_those_of_a_weaker_one(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text('[pins]\nsystem = "exact"\nplan = "attendable"\n')
    assert load_config(file=file).config.pins == {"system": "exact", "plan": "attendable"}
    monkeypatch.setenv("TIERKV_PINS", "user=attendable")
    assert load_config(file=file).config.pins == {"user": "attendable"}
    monkeypatch.setenv("TIERKV_PINS", "")
    assert load_config(file=file).config.pins == {}


def test_an_owner_rebuilt_from_plain_values_does_not_look_at_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = load_config({"hbm": "3MiB"}).config.model_dump(mode="json")
    monkeypatch.setenv("TIERKV_HBM", "9MiB")
    monkeypatch.setenv("TIERKV_HOST", "9MiB")
    assert DaemonConfig(**plain).hbm == 3 << 20
    assert DaemonConfig(**plain).model_dump(mode="json") == plain


# Refusals --------------------------------------------------------------------------------------------------------


def test_a_misspelt_key_is_an_error_with_a_suggestion_wherever_it_stands(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"'hmb' \(command line\); did you mean 'hbm'"):
        load_config({"hmb": "1GiB"})
    file.write_text("page_token = 16\n")
    with pytest.raises(ConfigError, match="did you mean 'page_tokens'"):
        load_config(file=file)
    monkeypatch.setenv("TIERKV_BACKUPS", "never")
    with pytest.raises(ConfigError, match=r"\(environment: TIERKV_BACKUPS\); did you mean 'backup'"):
        load_config()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"hbm": "4095"}, "hbm = 4095 bytes; the pool needs at least 4096"),
        ({"host": "17"}, "host = 17 bytes"),
        ({"codec": "k3v3"}, "did you mean 'k3v2'"),
        ({"policy": "mem-decay"}, "did you mean 'memdecay'"),
        ({"demotion": "lazy"}, "demotion = 'lazy'"),
        ({"pins": "sytem=exact"}, "region 'sytem' does not exist"),
        ({"pins": "system=hard"}, "'exact' or 'attendable'"),
        ({"pins": "system"}, "write region=level"),
        ({"low_watermark": 0.2, "high_watermark": 0.1}, "low <= high"),
        ({"high_watermark": 1.0}, "low <= high"),
        ({"observe_every": 0}, "observe_every = 0"),
        (
            {"observe_every": 4, "observe_window": 5},
            "observe_window = 5 steps, and an observation is made every",
        ),
        ({"http_port": 70_000}, "http_port = 70000"),
        ({"heartbeat_seconds": 8, "lease_seconds": 10}, "one late heartbeat"),
        ({"pin_quota": 1.5}, "pin_quota = 1.5"),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_its_name_and_value(
    flags: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        load_config(flags)


def test_every_wrong_value_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"codec": "zip", "demotion": "lazy"})
    assert "codec" in str(caught.value)
    assert "demotion" in str(caught.value)


def test_a_file_that_is_absent_or_no_toml_is_refused_by_name(file: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(file=file)
    file.write_text("hbm = = 3")
    with pytest.raises(ConfigError, match=r"tierkv\.toml cannot be read"):
        load_config(file=file)


# The machine -----------------------------------------------------------------------------------------------------


def machine(root: Path, available: int, cgroup: str = "", files: dict[str, str] | None = None) -> Path:
    """A /proc and /sys that state these limits."""
    everything = {
        "proc/meminfo": f"MemTotal: 999 kB\nMemAvailable: {available // 1024} kB\n",
        "proc/self/cgroup": cgroup,
    } | (files or {})
    for name, content in everything.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def config(tmp_path: Path, **flags: object) -> DaemonConfig:
    return load_config({"state_dir": tmp_path / "s", "host": 0} | flags).config


def test_more_hbm_than_memory_is_refused_with_value_and_limit(tmp_path: Path) -> None:
    root = machine(tmp_path, available=4 * GIB)
    with pytest.raises(
        ConfigError, match=r"hbm = 8 GiB, but the available memory leaves 3.5 GiB.*lower --hbm"
    ):
        check_machine(config(tmp_path, hbm="8GiB"), root)
    check_machine(config(tmp_path, hbm="3.5GiB"), root)


def test_both_pools_together_must_fit(tmp_path: Path) -> None:
    root = machine(tmp_path, available=2 * GIB)
    check_machine(config(tmp_path, hbm="1GiB", host="8KiB"), root)
    with pytest.raises(ConfigError, match=r"hbm \+ host = 1.56 GiB"):
        check_machine(config(tmp_path, hbm="1GiB", host="576MiB"), root)


def test_a_v2_cgroup_limits_through_its_parents_less_reclaimable_cache(tmp_path: Path) -> None:
    group = "sys/fs/cgroup"
    root = machine(
        tmp_path, 64 * GIB, "0::/pod/box\n",
        {
            f"{group}/pod/box/memory.max": "max\n",
            f"{group}/pod/box/memory.current": "0\n",
            f"{group}/pod/memory.max": f"{3 * GIB}\n",
            f"{group}/pod/memory.current": f"{2 * GIB}\n",
            f"{group}/pod/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        },
    )  # fmt: skip
    assert [(limit.name, limit.room) for limit in memory_limits(root)] == [
        ("available memory", 64 * GIB),
        ("cgroup's memory limit", 2 * GIB),
    ]
    with pytest.raises(ConfigError, match=r"the cgroup's memory limit leaves 1.5 GiB"):
        check_machine(config(tmp_path, hbm="1.75GiB"), root)


def test_a_v1_cgroup_limits_unless_it_says_unlimited(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory"
    files = {f"{group}/box/memory.limit_in_bytes": f"{GIB}\n", f"{group}/box/memory.usage_in_bytes": "0\n"}
    root = machine(tmp_path, 64 * GIB, "9:name=systemd:/\n4:memory:/box\n", files)
    assert memory_limits(root)[1].room == GIB
    (root / group / "box/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert [limit.name for limit in memory_limits(root)] == ["available memory"]


def test_a_host_pool_larger_than_its_file_system_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"free space of the file system.*lower --host"):
        check_machine(config(tmp_path, hbm="1MiB", host="900TiB"), machine(tmp_path, 1 << 60))


def test_the_pool_that_a_dead_owner_left_counts_as_room(tmp_path: Path) -> None:
    root = machine(tmp_path, available=GIB)
    asked = config(tmp_path, hbm="1MiB", host="1GiB")
    with pytest.raises(ConfigError, match="available memory"):
        check_machine(asked, root)
    check_machine(asked, root, reusable=GIB)


def test_a_state_directory_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a socket's path may have 107"):
        check_machine(
            config(tmp_path, state_dir="/tmp/" + "x" * 100, hbm="1MiB"), machine(tmp_path, 64 * GIB)
        )


def test_tokens_of_a_size_are_whole_pages_of_the_named_models() -> None:
    # Llama 3 8B: 32 layers x (K, V) x 8 heads x 128 x 2 bytes = 128 KiB a token.
    # SmolLM2-135M: 30 x 2 x 3 x 64 x 2 = 23,040 bytes.
    assert exact_tokens(8 * GIB, 16) == {"8B model": 65_536, "SmolLM2-135M": 8 * GIB // (16 * 23_040) * 16}
    assert exact_tokens(16 * 131_072 - 1, 16)["8B model"] == 0


# A policy of a file ----------------------------------------------------------------------------------------------

POLICY = """
policy = "memdecay-lift"
rho = 0.5
[half_life]
plan = inf
user = 7.0
[thresholds]
offload_below = 0.25
"""


def test_a_policy_file_names_the_policy_and_every_setting_is_kept(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tmp_path / "lift.toml"
    policy.write_text(POLICY)
    file.write_text(f'policy_file = "{policy}"\n')
    monkeypatch.chdir(tmp_path)
    by_file, origins = load_config(file=file)
    by_flag = load_config({"policy_file": "lift.toml"}).config
    monkeypatch.setenv("TIERKV_POLICY_FILE", str(policy))
    by_environment = load_config().config
    assert by_file == by_flag == by_environment
    assert (by_file.policy, by_file.policy_file) == ("memdecay-lift", policy)
    settings = by_file.policy_settings
    assert (settings["rho"], settings["alpha"]) == (0.5, MemDecayLift().alpha)  # given, and the default
    assert settings["half_life"]["user"] == 7.0  # type: ignore[index,call-overload]
    assert origins["policy"] == origins["policy_settings"] == f"policy file {policy}"
    assert origins["policy_file"] == f"file {file}"


def test_a_restart_has_the_settings_that_the_file_had(tmp_path: Path) -> None:
    policy = tmp_path / "lift.toml"
    policy.write_text(POLICY)
    plain = load_config({"policy_file": policy}).config.model_dump(mode="json")
    policy.unlink()
    carried = json.loads(
        json.dumps(plain, allow_nan=False)
    )  # strict JSON: what locks and /status are written in
    again = DaemonConfig(**carried)
    assert again.model_dump(mode="json") == plain
    chosen = policy_of(again.policy, again.policy_settings)
    assert isinstance(chosen, MemDecayLift)
    assert (chosen.rho, chosen.half_life[Region.PLAN], chosen.half_life[Region.USER]) == (0.5, math.inf, 7.0)
    assert chosen.thresholds.offload_below == 0.25


def test_a_policy_by_name_agrees_with_the_file_or_is_refused(tmp_path: Path) -> None:
    policy = tmp_path / "lift.toml"
    policy.write_text(POLICY)
    loaded = load_config({"policy": "memdecay-lift", "policy_file": policy})
    assert loaded.config.policy_settings["rho"] == 0.5
    assert loaded.origins["policy"] == "command line"
    with pytest.raises(
        ConfigError, match=r"policy = 'h2o', but the policy file .*lift.toml is of 'memdecay-lift'"
    ):
        load_config({"policy": "h2o", "policy_file": policy})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        ("policy = ", "cannot be read"),
        ("rho = 0.5\n", "does not say which policy"),
        ('policy = "mem-decay"\n', "did you mean 'memdecay'"),
        ('policy = "h2o"\nrho = 0.5\n', "no setting 'rho'"),
        ('policy = "memdecay"\nrho = 2.0\n', "rho"),
        ('policy = "memdecay"\n[half_life]\nplann = 1\n', "did you mean 'plan'"),
        ('policy = "memdecay"\nname = "mine"\n', "no setting 'name'"),
        (f'policy = "memdecay"\nrho = {"9" * 5000}\n', "cannot be read"),
        (f'policy = "memdecay"\nrho = {"[" * 5000}\n', "nested too deeply"),
        (f'policy = "ema"\n[{".".join("a" * 3000)}]\n', "nested too deeply"),
        ('policy = "snapkv"\nwindow = 1_000_000_000_000\n', "window: expected int <= 4096"),
        (f'policy = "random"\nseed = {10**30}\n', "seed: expected int <= 2147483647"),
    ],
)
def test_a_policy_file_that_cannot_be_used_is_refused_with_its_name(
    tmp_path: Path, text: str | None, said: str
) -> None:
    policy = tmp_path / "broken.toml"
    if text is not None:
        policy.write_text(text)
    with pytest.raises(ConfigError, match=said) as refused:
        load_config({"policy_file": policy})
    assert str(policy) in str(refused.value) and "\n" not in str(refused.value)


def test_a_policy_file_that_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for a writer
    for name, said in (("pipe", "no file"), (".", "no file"), ("nul\0", "cannot be read")):
        with pytest.raises(ConfigError, match=said):
            load_config({"policy_file": tmp_path / name})


@pytest.mark.parametrize("key", ["policy_file", "state_dir"])
def test_a_home_that_nobody_has_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match="~nobody-of-that-name/x begins in a home that is not known"):
        load_config({key: "~nobody-of-that-name/x"})


def test_infinite_thresholds_are_kept_as_json_and_what_is_no_number_is_refused() -> None:
    plain = load_config({"quantize_below": "inf", "drop_below": "-inf"}).config.model_dump(mode="json")
    again = DaemonConfig(**json.loads(json.dumps(plain, allow_nan=False)))
    assert (again.quantize_below, again.drop_below, again.offload_below) == (math.inf, -math.inf, None)
    with pytest.raises(ConfigError, match=r"drop_below = 'nan' .*is not a number; write inf or -inf"):
        load_config({"drop_below": "nan"})


def test_settings_of_a_policy_come_from_its_file_only() -> None:
    with pytest.raises(ConfigError, match=r"policy_settings \(command line\) cannot be set: .*policy_file"):
        load_config({"policy_settings": {"rho": 0.1}})


def test_an_empty_policy_file_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERKV_POLICY_FILE", "")
    config = load_config().config
    assert (config.policy_file, config.policy, config.policy_settings) == (None, "memdecay", {})


# Devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "index"), [("cpu", None), ("cuda", 0), ("cuda:0", 0), ("cuda:11", 11)])
def test_a_device_is_named_by_its_number(name: str, index: int | None) -> None:
    assert device_index(load_config({"device": name}, None).config.device) == index


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:0 ", "CPU", ""])
def test_what_is_no_device_is_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"device = .* is no device; write cpu, cuda or for instance cuda:1"
    ):
        load_config({"device": name}, None)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"codec": "kivi2"}, "codec = 'kivi2' has no kernels for a GPU; take k3v2, rotated2 or klt2"),
        ({"layer_codecs": "0=exact"}, "codec = 'k3v2,0=exact' has no kernels for a GPU"),
        ({"middle": "nf4"}, "middle = 'nf4': kernels on a GPU write no middle form"),
        ({"page_tokens": 24}, "page_tokens = 24: kernels on a GPU take a power of two"),
    ],
)
def test_what_a_gpu_does_not_serve_is_refused_there_and_nowhere_else(
    flags: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config(flags | {"device": "cuda:0"}, None)
    load_config(flags, None)
    load_config({"device": "cuda:0", "codec": "klt2"}, None)


def test_hbm_of_a_gpu_takes_none_of_this_machines_memory(tmp_path: Path) -> None:
    root = machine(tmp_path, 8 * GIB)
    with pytest.raises(ConfigError, match="hbm = 64 GiB"):
        check_machine(config(tmp_path, hbm="64GiB", host="1MiB"), root)
    check_machine(config(tmp_path, hbm="64GiB", host="1MiB", device="cuda:0"), root)
