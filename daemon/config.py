"""The daemon's settings: command line over `TIERKV_*` over a TOML file over defaults, each value with its origin.

Nothing is ignored: a key that does not exist, in any of the three places, is a `ConfigError` with a suggestion.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from tierkv import folders
from tierkv.daemon import limits
from tierkv.daemon.gpu import CPU, device_index
from tierkv.daemon.setting_values import (
    Fraction,
    Number,
    PinLevel,
    Score,
    Seconds,
    Size,
    parse_layers,
    parse_pins,
)
from tierkv.errors import ConfigError, UnknownRegion
from tierkv.geometry import PAGE_TOKENS, Geometry
from tierkv.handshake import default_state_dir, socket_path
from tierkv.prefetch.digest_settings import DEFAULT_BYTES, LEAST_BYTES, MOST_BYTES, DigestSetting
from tierkv.protocol import ATTACH_SOCKET, REQUEST_SOCKET, Observing
from tierkv.regions import parse_region

PREFIX = "TIERKV_"
OTHER_VARIABLES = frozenset({"TIERKV_CONFIG", "TIERKV_CACHE"})
"""`TIERKV_*` variables that are not settings of the daemon: the file to read, and where models are cached."""

DERIVED = {"policy_settings": "write the settings into a file, and name it as policy_file"}
"""Settings that follow from others, and what to set instead."""

SMALLEST_POOL = 4096
"""Bytes; a pool is mapped in pages of this size."""

REFERENCE_MODELS: dict[str, tuple[int, int, int]] = {"8B model": (32, 8, 128), "SmolLM2-135M": (30, 3, 64)}
"""Layers, KV heads, head_dim of models by which sizes are stated in tokens (the 8B is Llama 3's)."""


def _default_calibration() -> Path | None:
    try:
        return folders.calibrations()
    except RuntimeError:  # there is no home
        return None


class DaemonConfig(BaseSettings):
    """Every setting of one daemon. Sizes in bytes, times in seconds. `load_config` fills it from its sources."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True
    )

    hbm: Size = 1 << 30
    """Bytes of HBM a device, everything included (pages, low-bit pages, codec state)."""
    device: str = CPU
    """Where HBM is: `cuda:0` is a GPU by its number in this process, `cpu` this machine's memory."""
    host: Size = 4 << 30
    """Bytes of host memory a node; 0 keeps nothing in host memory."""
    state_dir: Path = Field(default_factory=default_state_dir)
    """Sockets, host pool, lock and epoch of this daemon; private to its user."""
    http_host: str = "127.0.0.1"
    """Where /metrics, /health, /ready, /status and /version are served. Read-only, but keep it private."""
    http_port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """0 takes any free port; `http.json` in the state directory names it."""
    ray_address: str = ""
    """A Ray cluster to join; empty starts a local Ray that ends with the daemon."""
    codec: str = "k3v2"
    """Low-bit form of a page."""
    layer_codecs: Annotated[dict[str, str], NoDecode, BeforeValidator(parse_layers)] = {}
    """Layers that have a form of their own in a low-bit page, for instance `0=exact,-1=exact` (-1: the last one)."""
    middle: str = ""
    """A second packed form, between exact and low-bit: nf4, int8 (for float32 pages) or kivi2; empty for none."""
    calibration: Annotated[Path | None, BeforeValidator(lambda value: value or None)] = Field(
        default_factory=_default_calibration
    )
    """File or folder of `tierkv calibrate`, for codecs that are fitted from it (klt2); empty: from pages alone."""
    policy: str = "memdecay"
    """Which score decides what stays."""
    policy_file: Annotated[Path | None, BeforeValidator(lambda value: value or None)] = None
    """A TOML file that names a policy and its settings; read once, at the start."""
    policy_settings: dict[str, Number | str | dict[str, Number | str]] = {}
    """What `policy_file` says, every setting; it cannot be set on its own."""
    demotion: Literal["pressure", "eager"] = "pressure"
    """`pressure`: a page keeps its fast replica until HBM is wanted; `eager` frees it as soon as its score allows."""
    backup: Literal["on_seal", "on_demote", "never"] = "on_seal"
    """When a page's exact bytes are copied to host memory."""
    middle_below: Score | None = None
    """Score below which a page may take the middle form; unset: halfway from `quantize_below` to `promote_above`."""
    quantize_below: Score | None = None
    offload_below: Score | None = None
    drop_below: Score | None = None
    promote_above: Score | None = None
    """Score thresholds; unset takes the policy's own."""
    low_watermark: Fraction = 0.05
    """Free fraction of HBM below which pages are demoted ..."""
    high_watermark: Fraction = 0.10
    """... until this fraction is free."""
    sink_tokens: Annotated[int, Field(ge=0)] = 16
    """First tokens of a session that stay exact, whatever the policy."""
    recent_tokens: Annotated[int, Field(ge=0)] = 64
    """Last tokens of a session that stay exact, whatever the policy: low-bit only when nothing else can give way."""
    pins: Annotated[dict[str, PinLevel], NoDecode, BeforeValidator(parse_pins)] = {"system": "attendable"}
    """Regions whose pages stay `exact` or `attendable`, unless a session says otherwise."""
    pin_quota: Fraction = 0.5
    """Fraction of HBM that pinned pages may hold."""
    digest_share: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    """Fraction of HBM that digests of cold pages may take; 0 makes none, and cold pages are not recalled."""
    digest_layers: Annotated[int, Field(ge=0)] = 0
    """How many of a model's last layers a digest describes; 0 is all of them."""
    digest: DigestSetting = "auto"
    """What a digest holds: `deviation`, mean and deviation of keys, for any model; `transform`, keys in `digest_bytes`,
    for a model that was calibrated before the daemon started; `auto`, the latter where it can be and its state fits
    `digest_share`."""
    digest_bytes: Annotated[int, Field(ge=LEAST_BYTES, le=MOST_BYTES)] = DEFAULT_BYTES
    """Bytes of a transform digest, a layer and KV head."""
    observe_every: Annotated[int, Field(ge=1)] = 4
    """Decode steps between observations of attention mass (k)."""
    observe_window: Annotated[int, Field(ge=1)] = 1
    """Decode steps whose masses an observation averages, at most `observe_every`; each costs what observing does."""
    observe_queries: Annotated[int, Field(ge=1, le=1024)] = 16
    """Last queries of a prefill chunk that observe: they give a fresh prompt an order."""
    observe_layers: Annotated[int, Field(ge=0)] = 0
    """Layers whose mass is looked at, spread evenly over the model's; 0 is all of them. An audit looks at all."""
    page_tokens: Annotated[int, Field(ge=1, le=1024)] = PAGE_TOKENS
    layout: Literal["aligned", "straddling"] = "aligned"
    """`aligned`: a page holds one region; `straddling`: pages fill up across regions, as in the paper."""
    lease_seconds: Seconds = 10.0
    """Silence after which a worker's pages are quarantined."""
    heartbeat_seconds: Seconds = 1.0
    min_residency_steps: Annotated[int, Field(ge=0)] = 8
    """Decode steps that a promoted page stays at least."""
    max_moves_in_flight: Annotated[int, Field(ge=1)] = 32
    measure_every: Annotated[int, Field(ge=0)] = 256
    """Of so many pages that become low-bit, one is compared with its exact bytes (`tierkv_quantization_error_ratio`); 0
    compares none. It costs what encoding two more pages does."""
    move_bandwidth: Size = 0
    """Bytes a second that moves may take from decoding; 0 is unbounded."""
    predict: bool = False
    """Take a session that is silent for 3 s for paused, for as long as its silences usually last."""
    promotion_batch: Annotated[Size, Field(ge=1)] = 8 << 20
    """Bytes read from host memory for promotions at a time; two batches are in flight at most."""
    retain_most: Seconds = 600.0
    """Most seconds that a `retain` hint may keep pages from leaving HBM."""
    waste_limit: Fraction = 0.25
    """Share that may be wasted of pages that take others' places in HBM; 1 sets no limit."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @model_validator(mode="before")
    @classmethod
    def _read_policy(cls, given: dict[str, object]) -> dict[str, object]:
        """The policy of the file and its settings, unless they are given (an owner that restarts)."""
        file, name = given.get("policy_file"), given.get("policy")
        if not file or given.get("policy_settings"):
            return given
        from tierkv.daemon.policy import load
        from tierkv.daemon.policy_settings import settings_of

        policy = load(_at_home(Path(str(file))))
        if name is not None and name != policy.name:
            raise ConfigError(
                f"policy = {name!r}, but the policy file {file} is of {policy.name!r}; leave one of the two out"
            )
        return given | {"policy": policy.name, "policy_settings": settings_of(policy)}

    @field_validator("state_dir", "policy_file", "calibration")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return value and _at_home(value).absolute()

    @field_validator("codec", "policy")
    @classmethod
    def _known(cls, value: str, info: ValidationInfo) -> str:
        names = _choices(info.field_name or "")
        if value not in names:
            raise ValueError(f"is not one of {', '.join(names)}{_suggest(value, names)}")
        return value

    @field_validator("device")
    @classmethod
    def _device(cls, value: str) -> str:
        device_index(value)
        return value

    @field_validator("layer_codecs")
    @classmethod
    def _known_forms(cls, value: dict[str, str]) -> dict[str, str]:
        names = _choices("codec") if value else ()
        for layer, codec in value.items():
            if codec not in names:
                raise ValueError(
                    f"has {codec!r} for layer {layer}, which is not one of {', '.join(names)}{_suggest(codec, names)}"
                )
        return value

    @field_validator("middle")
    @classmethod
    def _known_middle(cls, value: str) -> str:
        if not value:
            return value
        from tierkv.daemon.middle import MIDDLE_NAMES, WHY_ONLY_THOSE

        if value not in MIDDLE_NAMES:
            why = f": {WHY_ONLY_THOSE}" if value in _choices("codec") else _suggest(value, MIDDLE_NAMES)
            raise ValueError(f"is not one of {', '.join(MIDDLE_NAMES)}, nor empty for none{why}")
        return value

    @field_validator("pins")
    @classmethod
    def _regions(cls, value: dict[str, PinLevel]) -> dict[str, PinLevel]:
        try:
            return {parse_region(name).label: level for name, level in value.items()}
        except UnknownRegion as error:
            raise ValueError(str(error)) from None

    @model_validator(mode="after")
    def _coherent(self) -> DaemonConfig:
        if self.hbm < SMALLEST_POOL:
            raise ConfigError(
                f"hbm = {self.hbm} bytes; the pool needs at least {SMALLEST_POOL}, for instance 8GiB"
            )
        if 0 < self.host < SMALLEST_POOL:
            raise ConfigError(
                f"host = {self.host} bytes; give at least {SMALLEST_POOL}, or 0 for no host tier"
            )
        if self.device != CPU:
            from tierkv.quant.on_device import require_served

            require_served(self.low_bit_form, self.middle, self.page_tokens)
        if self.observe_window > self.observe_every:
            raise ConfigError(
                f"observe_window = {self.observe_window} steps, and an observation is made every "
                f"observe_every = {self.observe_every}; lower the first or raise the second"
            )
        if self.middle and (self.backup == "never" or not self.host):
            why = 'backup = "never"' if self.backup == "never" else "host = 0"
            raise ConfigError(
                f"middle = {self.middle!r} with {why}: a page becomes low-bit from its exact copy in host memory, "
                "never from its middle form, so without copies none could; leave middle out, or keep copies"
            )
        if self.middle_below is not None and not self.middle:
            raise ConfigError(
                f"middle_below = {self.middle_below:g} without a middle form; set middle, or leave it out"
            )
        if not self.low_watermark <= self.high_watermark < 1:
            raise ConfigError(
                f"low_watermark = {self.low_watermark} and high_watermark = {self.high_watermark}; "
                "they are free fractions of HBM with low <= high < 1"
            )
        if self.heartbeat_seconds * 2 > self.lease_seconds:
            raise ConfigError(
                f"heartbeat_seconds = {self.heartbeat_seconds:g} is more than half of lease_seconds = "
                f"{self.lease_seconds:g}: one late heartbeat would end a lease; lower the first or raise the second"
            )
        return self

    @property
    def observing(self) -> Observing:
        """As workers are told."""
        return Observing(self.observe_every, self.observe_window, self.observe_queries, self.observe_layers)

    @property
    def low_bit_form(self) -> str:
        """`codec` with the exceptions of `layer_codecs`, as `quant.get` reads it."""
        from tierkv.quant.layered import spell

        return spell(self.codec, {int(layer): codec for layer, codec in self.layer_codecs.items()})

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what is passed: `load_config` layers the sources, and an owner restarts with the values it was given."""
        return (init_settings,)


class Loaded(NamedTuple):
    """`origins` names, for each setting, where its value comes from."""

    config: DaemonConfig
    origins: dict[str, str]


def load_config(flags: Mapping[str, object] | None = None, file: str | Path | None = None) -> Loaded:
    """Settings from `flags` (the command line), the environment, `file` (default `$TIERKV_CONFIG`) and defaults.

    Raises:
        ConfigError: an unknown key, a value that cannot be, a file that cannot be read.
    """
    flags = {key: value for key, value in (flags or {}).items() if value is not None}
    file = file or os.environ.get("TIERKV_CONFIG") or None
    layers: list[tuple[str, Mapping[str, object]]] = [
        ("command line", flags),
        ("environment", _from_environment()),
        (f"file {file}", _from_file(Path(file)) if file else {}),
    ]
    values: dict[str, object] = {}
    origins = dict.fromkeys(DaemonConfig.model_fields, "default")
    for origin, layer in reversed(layers):
        for key in layer:
            if key not in DaemonConfig.model_fields or key in DERIVED:
                raise _unknown(key, origin)
        values |= layer
        origins |= dict.fromkeys(layer, origin)
    try:
        config = DaemonConfig(**values)  # type: ignore[arg-type]  # checked by pydantic
    except ValidationError as error:
        raise ConfigError("\n".join(_say(problem, origins) for problem in error.errors())) from None
    if config.calibration is not None and origins["calibration"] != "default":
        from tierkv.daemon import calibrations  # brings kernels

        calibrations.check(config.calibration)
    if config.policy_file is not None:
        origin = f"policy file {config.policy_file}"
        origins |= {"policy_settings": origin} | ({} if "policy" in values else {"policy": origin})
    return Loaded(config, origins)


def check_machine(config: DaemonConfig, root: Path = Path("/"), reusable: int = 0) -> None:
    """Refuse a configuration that this machine cannot serve (see `limits`).

    Args:
        root: where /proc and /sys are.
        reusable: bytes that a dead owner's host pool holds already.

    Raises:
        ConfigError: names the value, the limit, and what to change.
    """
    for name in (ATTACH_SOCKET, REQUEST_SOCKET):
        socket_path(config.state_dir, name)
    room = limits.file_system_room(config.state_dir)
    hbm = config.hbm if config.device == CPU else 0  # else it is not this machine's memory
    limits.check_sizes(hbm, config.host, limits.memory_limits(root), room, reusable)


def exact_tokens(size: int, page_tokens: int) -> dict[str, int]:
    """Exact tokens that `size` bytes hold, in bfloat16, for each of `REFERENCE_MODELS`; whole pages only."""
    held = {}
    for model, (layers, heads, head_dim) in REFERENCE_MODELS.items():
        page = Geometry(layers, heads, head_dim, "bfloat16", page_tokens)
        held[model] = size // page.page_bytes * page_tokens
    return held


def show_size(size: int, page_tokens: int) -> str:
    """`8 GiB (8,589,934,592 bytes): 65,536 exact tokens of an 8B model in bfloat16 or 391,344 of SmolLM2-135M`."""
    first, second = exact_tokens(size, page_tokens).items()
    return (
        f"{limits.show_bytes(size)} ({size:,} bytes): {first[1]:,} exact tokens of an {first[0]} in bfloat16 "
        f"or {second[1]:,} of {second[0]}"
    )


def _at_home(path: Path) -> Path:
    """With `~` as a home. Raises `ConfigError` where there is none."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise ConfigError(f"{path} begins in a home that is not known; write the whole path") from None


def _choices(field: str) -> tuple[str, ...]:
    """Names that `codec` and `policy` may have (imported when asked: both bring kernels)."""
    if field == "codec":
        from tierkv.quant import NAMES

        return NAMES
    from tierkv.daemon.policy import POLICIES

    return tuple(POLICIES)


def _from_environment() -> dict[str, object]:
    known = {f"{PREFIX}{name}".upper() for name in DaemonConfig.model_fields}
    for variable in os.environ:
        if variable.startswith(PREFIX) and variable not in known | OTHER_VARIABLES:
            raise _unknown(variable.removeprefix(PREFIX).lower(), f"environment: {variable}")
    return EnvSettingsSource(DaemonConfig)()


def _from_file(file: Path) -> dict[str, object]:
    if not file.is_file():
        raise ConfigError(f"the configuration file {file} does not exist; check --config")
    try:
        return TomlConfigSettingsSource(DaemonConfig, file)()
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError(f"the configuration file {file} cannot be read: {error}") from None


def _unknown(key: str, origin: str) -> ConfigError:
    if key in DERIVED:
        return ConfigError(f"{key} ({origin}) cannot be set: {DERIVED[key]}")
    names = [name for name in DaemonConfig.model_fields if name not in DERIVED]
    return ConfigError(
        f"there is no setting {key!r} ({origin}){_suggest(key, names)} (`tierkv config show` lists all)"
    )


def _suggest(name: str, names: list[str] | tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name.lower().replace("-", "_"), names, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def _say(problem: object, origins: Mapping[str, str]) -> str:
    """One pydantic problem as `name = value (origin) what is wrong`."""
    assert isinstance(problem, dict)
    key = str(problem["loc"][0])
    message = str(problem["msg"]).removeprefix("Value error, ")
    if not message.startswith(("is ", "has ", "names ")):
        message = message[0].lower() + message[1:]
    return f"{'.'.join(map(str, problem['loc']))} = {problem['input']!r} ({origins[key]}): {message}"
