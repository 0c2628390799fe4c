"""Plugins as they are installed: metadata and a module on the path, loaded through the real entry points."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pluggy
import pytest
from pegainfer_core.config import EngineConfig
from pegainfer_core.errors import ConfigError, PluginError, UnsupportedModelError
from pegainfer_core.plugins import load_plugins
from pegainfer_core.resolve import resolve_model

FAMILY = """
from collections.abc import Mapping
from typing import Any
from pegainfer_core.family import ModelFamily, SupportCard
from pegainfer_core.hookspecs import hookimpl

class Family(ModelFamily):
    name = "{name}"
    support = SupportCard(checkpoints=("none",), attention="none", precisions=("float32",))

    def rejects(self, hf_config: Mapping[str, Any]) -> str | None:
        {rejects}

    def plan(self, hf_config, engine_config, options):
        raise NotImplementedError

    def build(self, plan, context):
        raise NotImplementedError

@hookimpl
def pegainfer_model_families():
    return [Family()]
"""

OBSERVER = """
from pegainfer_core.hookspecs import hookimpl

SEEN = []

@hookimpl{marks}
def pegainfer_step_finished({argument}):
    SEEN.append({seen})
"""


def by_type(model_type: str) -> str:
    return (
        f"return None if hf_config.get('model_type') == {model_type!r} else "
        f"f\"model_type {{hf_config.get('model_type')!r}} is not {model_type!r}\""
    )


class Site:
    """A folder on the import path in which distributions are installed by writing their files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, name: str, source: str, *, group: str = "pegainfer", value: str | None = None) -> None:
        """A distribution `NAME` 1.0 with one module and one entry point of the same name."""
        module = f"site_{name.replace('-', '_')}"
        (self.folder / f"{module}.py").write_text(source)
        info = self.folder / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dist-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value or module}\n")

    def install_family(
        self,
        name: str,
        family: str | None = None,
        rejects: str | None = None,
        plan: str = "raise NotImplementedError",
    ) -> None:
        """A distribution with one family; it serves its own name as model_type unless told otherwise."""
        family = family or name
        source = FAMILY.format(name=family, rejects=rejects or by_type(family))
        self.install(name, source.replace("raise NotImplementedError", plan, 1))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("PEGAINFER_PLUGINS", raising=False)
    yield Site(tmp_path)
    for name in [name for name in sys.modules if name.startswith("site_")]:
        del sys.modules[name]


def allow(monkeypatch: pytest.MonkeyPatch, names: str) -> None:
    monkeypatch.setenv("PEGAINFER_PLUGINS", names)


def test_families_are_sorted_by_name_and_found_by_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install_family("zebra")
    site.install_family("ant")
    allow(monkeypatch, "zebra, ant")
    plugins = load_plugins()
    assert [family.name for family in plugins.families] == ["ant", "zebra"]
    assert plugins.broken == []
    assert plugins.family("ant") is plugins.families[0]
    assert plugins.family_origin(plugins.families[1]) == ("dist-zebra", "1.0")
    with pytest.raises(PluginError, match=r"'gnu'.*ant, zebra"):
        plugins.family("gnu")


def test_plugins_that_fail_to_import_hurt_nobody_else(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("a-missing", "import no_such_module_of_anybody")
    site.install("b-exits", "raise SystemExit(3)")
    site.install("c-syntax", "def broken(:\n")
    site.install_family("d")
    allow(monkeypatch, "a-missing,b-exits,c-syntax,d")
    plugins = load_plugins()
    assert [family.name for family in plugins.families] == ["d"]
    assert [broken.name for broken in plugins.broken] == ["a-missing", "b-exits", "c-syntax"]
    assert str(plugins.broken[0]) == (
        "a-missing: not loaded - ModuleNotFoundError: No module named 'no_such_module_of_anybody' (dist-a-missing 1.0)"
    )
    assert plugins.broken[2].reason.startswith("SyntaxError")
    assert plugins.names == ["d"]


def test_a_misspelt_hook_takes_the_plugin_out(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FAMILY.format(name="typo", rejects=by_type("typo"))
    site.install("typo", source + "\n\n@hookimpl\ndef pegainfer_step_finishd(report): pass\n")
    site.install_family("good")
    allow(monkeypatch, "typo,good")
    plugins = load_plugins()
    assert [family.name for family in plugins.families] == ["good"]
    assert "no hook 'pegainfer_step_finishd'" in plugins.broken[0].reason
    assert "pegainfer_step_finished" in plugins.broken[0].reason


def test_an_unknown_hook_is_fine_where_the_plugin_says_that_it_is_optional(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FAMILY.format(name="soft", rejects=by_type("soft"))
    site.install("soft", source + "\n\n@hookimpl(optionalhook=True)\ndef pegainfer_of_the_future(): pass\n")
    allow(monkeypatch, "soft")
    assert load_plugins().broken == []


def test_a_wrong_signature_leaves_nothing_registered(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "from pegainfer_core.hookspecs import hookimpl\n\n@hookimpl\ndef pegainfer_step_finished(report, more): pass\n"
    )
    site.install("wide", source)
    allow(monkeypatch, "wide")
    plugins = load_plugins()
    assert "more" in plugins.broken[0].reason
    assert plugins.step_observers() == []


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("return [object()]", "no ModelFamily"),
        ("return None", "TypeError"),
        ("raise ValueError('nothing today')", "ValueError: nothing today"),
    ],
)
def test_families_are_checked(site: Site, monkeypatch: pytest.MonkeyPatch, source: str, reason: str) -> None:
    body = (
        f"from pegainfer_core.hookspecs import hookimpl\n\n@hookimpl\ndef pegainfer_model_families():\n    {source}\n"
    )
    site.install("odd", body)
    allow(monkeypatch, "odd")
    assert reason in load_plugins().broken[0].reason


def test_an_abstract_family_fails_at_construction(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FAMILY.format(name="half", rejects=by_type("half")).replace("def build(", "def not_build(")
    site.install("half", source)
    allow(monkeypatch, "half")
    assert "build" in load_plugins().broken[0].reason


def test_a_family_name_given_twice_names_both(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install_family("one", family="same")
    site.install_family("two", family="same")
    site.install_family("other")
    allow(monkeypatch, "one,two,other")
    plugins = load_plugins()
    assert [family.name for family in plugins.families] == ["other"]
    assert [broken.name for broken in plugins.broken] == ["one", "two"]
    for broken in plugins.broken:
        assert "one (dist-one 1.0) and two (dist-two 1.0)" in broken.reason


def test_the_allow_list_is_applied_before_import(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("loud", "raise RuntimeError('imported')")
    site.install_family("quiet")
    allow(monkeypatch, "quiet")
    plugins = load_plugins()
    assert plugins.broken == []
    assert "site_loud" not in sys.modules
    allow(monkeypatch, "")
    assert load_plugins().names == []


def test_an_unknown_name_in_the_allow_list_is_an_error(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install_family("quiet")
    allow(monkeypatch, "quiet,absent")
    with pytest.raises(PluginError, match=r"PEGAINFER_PLUGINS names absent; installed: .*quiet"):
        load_plugins()


def test_the_one_family_that_does_not_decline_gets_the_checkpoint(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install_family("ant")
    site.install_family("zebra")
    allow(monkeypatch, "ant,zebra")
    assert load_plugins().claim({"model_type": "zebra"}).name == "zebra"


def test_nobody_claims_and_everybody_says_why(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install_family("ant")
    site.install_family("fragile", rejects="return hf_config['vision']['depth']")
    site.install("gone", "import no_such_module_of_anybody")
    allow(monkeypatch, "ant,fragile,gone")
    with pytest.raises(UnsupportedModelError) as caught:
        load_plugins().claim({"model_type": "bee", "architectures": ["Bee"]})
    assert str(caught.value).splitlines() == [
        "no installed family serves this model (model_type='bee', architectures=['Bee'])",
        "  ant: model_type 'bee' is not 'ant'",
        "  fragile: could not read config.json - KeyError: 'vision'",
        "  gone: not loaded - ModuleNotFoundError: No module named 'no_such_module_of_anybody' (dist-gone 1.0)",
    ]


def test_two_claims_name_both(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install_family("ant")
    site.install_family("mimic", rejects="return None")
    allow(monkeypatch, "ant,mimic")
    with pytest.raises(UnsupportedModelError, match=r"ant and mimic both serve this model; set PEGAINFER_PLUGINS or"):
        load_plugins().claim({"model_type": "ant"})


@pytest.mark.parametrize(
    "config", [{"model_type": "bee_5"}, {"model_type": "wrap", "text_config": {"model_type": "bee_5"}}]
)
def test_a_known_model_type_names_the_extra(
    site: Site, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    site.install("bee_5", "", group="pegainfer.model_types", value="bee_big")
    site.install_family("ant")
    allow(monkeypatch, "ant")
    with pytest.raises(UnsupportedModelError) as caught:
        load_plugins().claim(config)
    hint = "config.json says model_type 'bee_5': install it with pip install 'pegainfer[bee-big]'"
    assert hint in str(caught.value).splitlines()


def test_no_hint_to_install_what_is_installed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("ant", FAMILY.format(name="ant", rejects="return 'a shape of tomorrow'"))
    site.install("ant_type", "", group="pegainfer.model_types", value="ant")
    allow(monkeypatch, "ant")
    with pytest.raises(UnsupportedModelError) as caught:
        load_plugins().claim({"model_type": "ant_type"})
    assert "pip install" not in str(caught.value)


def test_without_any_plugin_the_error_says_so(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, "")
    with pytest.raises(UnsupportedModelError, match="no plugin is in use"):
        load_plugins().claim({})


def test_observers_may_take_fewer_arguments_and_nobody_means_empty(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("full", OBSERVER.format(marks="", argument="report", seen="report"))
    site.install("brief", OBSERVER.format(marks="", argument="", seen="1"))
    site.install_family("ant")
    allow(monkeypatch, "full,brief,ant")
    observers = load_plugins().step_observers()
    report: Any = types.SimpleNamespace(index=7)
    for observe in observers:
        observe(report)
    assert sys.modules["site_full"].__dict__["SEEN"] == [report]
    assert sys.modules["site_brief"].__dict__["SEEN"] == [1]
    allow(monkeypatch, "ant")
    assert load_plugins().step_observers() == []


def test_hooks_of_a_host_are_known_once_given(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    host = types.ModuleType("host_hooks")

    def pegainfer_host_event(a: int, b: int) -> None:
        """Hook of a host."""

    host.__dict__["pegainfer_host_event"] = pluggy.HookspecMarker("pegainfer")(pegainfer_host_event)
    source = (
        "from pegainfer_core.hookspecs import hookimpl\n\n@hookimpl\ndef pegainfer_host_event(b):\n    return b * 2\n"
    )
    site.install("guest", source)
    allow(monkeypatch, "guest")
    assert "no hook" in load_plugins().broken[0].reason
    plugins = load_plugins(extra_hookspecs=[host])
    assert plugins.broken == []
    assert [implementation(a=1, b=4) for implementation in plugins.implementations("pegainfer_host_event")] == [8]


def test_hooks_that_a_distribution_publishes_are_known_everywhere(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = "import pluggy\n\n@pluggy.HookspecMarker('pegainfer')\ndef pegainfer_published(): ...\n"
    site.install("spec", spec, group="pegainfer.hookspecs")
    site.install(
        "guest", "from pegainfer_core.hookspecs import hookimpl\n\n@hookimpl\ndef pegainfer_published(): return 5\n"
    )
    allow(monkeypatch, "guest")
    assert [call() for call in load_plugins().implementations("pegainfer_published")] == [5]


def test_wrappers_are_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("wrap", OBSERVER.format(marks="(wrapper=True)", argument="report", seen="(yield)"))
    allow(monkeypatch, "wrap")
    assert "cannot be wrapped" in load_plugins().broken[0].reason


def test_loading_all_installed_plugins_is_import_light() -> None:
    code = (
        "import sys; from pegainfer_core.plugins import load_plugins; plugins = load_plugins();"
        "heavy = {'torch', 'transformers', 'triton'} & set(sys.modules);"
        "assert not heavy, heavy; assert not plugins.broken, plugins.broken"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# what a family's code does wrong

PLAN = """import pegainfer_core.family as f
        rule = f.WeightRule(parameter='w', sources=(f.TensorSpec(name='w', shape=(8, 8)),))
        group = f.KVGroup(kind='full', layers=(0,), num_kv_heads=1, head_dim=8)
        sizes = dict(vocab_size=8, hidden_size=8, num_layers=1, max_context=8)
        groups = dict(kv_groups=(group,), weight_rules=(rule,))
        changes = dict(CHANGES)
        return f.ModelPlan(**dict(family='x', config=None, dtype='float32', eos_token_ids=frozenset(), **sizes, **groups) | changes)"""


def planned(changes: str) -> str:
    """The body of a plan() that is right but for these fields."""
    return PLAN.replace("CHANGES", changes)


def resolve(folder: Path, **config: Any) -> Any:
    """What becomes of a checkpoint with nothing but a config.json of model_type x."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "x", "sizes": [1, 2], **config}))
    return resolve_model(EngineConfig(model=str(checkpoint)), load_plugins())


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("raise KeyError('hidden_size')", "failed in plan: KeyError: 'hidden_size'"),
        ("import sys; sys.exit('bye')", "failed in plan: SystemExit: bye"),
        ("return {'a': 1}", "returned a dict from plan; it must be a ModelPlan"),
        ("return None", "returned a NoneType from plan; it must be a ModelPlan"),
        (planned("num_layers='1'"), "planned num_layers '1'; it must be a positive int"),
        (planned("vocab_size=0"), "planned vocab_size 0; it must be a positive int"),
        (planned("num_layers=2"), "planned KV groups that do not cover each of 2 layers once"),
        (
            planned("num_layers=2, kv_groups=(group, f.KVGroup(kind='state', layers=(1,)))"),
            "planned a KV group of kind 'state' with 0 heads of 0 and 0 state tensors",
        ),
        (
            planned("kv_groups=(f.KVGroup(kind='full', layers=(0,), state=(f.StateTensor(name='s', shape=(2,)),)),)"),
            "planned a KV group of kind 'full' with 0 heads of 0 and 1 state tensors",
        ),
        (
            planned("kv_groups=(f.KVGroup(kind='latent', layers=(0,), num_kv_heads=1, head_dim=8),)"),
            "planned a KV group of kind 'latent' with 1 heads of 8 and 0 state tensors",
        ),
        (
            planned("kv_groups=(f.KVGroup(kind='latent', layers=(0,), latent_rank=8),)"),
            "planned a KV group of kind 'latent' with 0 heads of 0, 8 latent values with a shared key of 0 and 0 state tensors",
        ),
        (planned("weight_rules=[rule]"), "planned weight_rules that are no tuple of WeightRules, or an empty one"),
    ],
)
def test_a_plan_that_fails_is_the_plugins_mistake(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str, message: str
) -> None:
    site.install_family("x", plan=plan)
    allow(monkeypatch, "x")
    with pytest.raises(PluginError) as caught:
        resolve(tmp_path)
    assert str(caught.value) == f"family x (dist-x 1.0) {message}"


def test_a_refusal_by_a_family_is_told_as_it_is(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install_family("x", plan="from pegainfer_core.errors import ConfigError; raise ConfigError('no such head')")
    allow(monkeypatch, "x")
    with pytest.raises(ConfigError) as caught:
        resolve(tmp_path)
    assert str(caught.value) == "no such head"


def test_groups_without_a_pool_are_refused(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sliding = "kv_groups=(f.KVGroup(kind='sliding', layers=(0,), num_kv_heads=1, head_dim=8, window=4),)"
    site.install_family("x", plan=planned(sliding))
    allow(monkeypatch, "x")
    with pytest.raises(
        ConfigError, match="KV group of kind 'sliding'; this version has kinds 'full', 'latent' and 'state'"
    ):
        resolve(tmp_path)


def test_families_cannot_change_the_config_that_others_see(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install_family("a", rejects="hf_config['model_type'] = 'y'; hf_config['sizes'].append(3); return 'not mine'")
    site.install_family("x", plan="hf_config['sizes'].clear(); " + planned(""))
    allow(monkeypatch, "a,x")
    resolved = resolve(tmp_path)
    assert resolved.package == "dist-x 1.0"
    assert resolved.checkpoint.config == {"model_type": "x", "sizes": [1, 2]}


def test_a_family_that_neither_claims_nor_gives_a_reason_declines(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install_family("x", rejects="return False")
    allow(monkeypatch, "x")
    with pytest.raises(UnsupportedModelError, match=r"x: its rejects\(\) returned bool False"):
        resolve(tmp_path)
