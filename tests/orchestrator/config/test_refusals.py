"""Explanations of mistakes on a command line: argument, value, rule, remedy, and exit status 2."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from composition import composed_tree, groups
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from sampling import sampled

from orchestrator import __main__ as command_line
from orchestrator.catalogue.data import DATA
from orchestrator.config import hydra_options
from orchestrator.config.compose import plain
from orchestrator.config.refusals.refused_settings import explain, is_refusal
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.specs import Job
from orchestrator.execution import interrupts
from orchestrator.sweep.conductor import run

Ask = Callable[..., str]


def told(*settings: str) -> str:
    """Return the explanation of a line without options: composed as Hydra does, and planned."""
    try:
        config = plain(composed_tree([*settings]))
    except Exception as error:
        if not is_refusal(error):
            raise
        return explain(error, composed_tree, settings, groups()) + "\n"
    with pytest.raises(OrchestratorError) as refused:
        run([Job(settings, {**config, "dry_run": True})])
    assert refused.value.exit_status == 2
    return f"{refused.value}\n"


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Ask]:
    """Yield a function that types a command line in a directory with a custom model, data set, method and preset."""
    own = {
        "data/mydigits.yaml": "_target_: theirs.digits\nsize: 100\n",
        "model/mynet.yaml": "_target_: theirs.Net\nwidth: 8\n",
        "method/mymethod.yaml": "_target_: theirs.Largest\n",
        "sweep/mysweep.yaml": "# @package _global_\ndefaults: [override /model: mynet]\nhydra: {mode: MULTIRUN}\n",
        "sweep/unheaded.yaml": "defaults: [override /model: mynet]\n",
        "method/targetless.yaml": "_target_: ???\n",
        "method/keys_only.yaml": "amount: 0.5\n",
        "method/unheaded.yaml": "defaults: [magnitude, override /score: snipp]\n",
        "model/broken.yaml": "_target_: theirs.Net\nwidth: ${no.such}\n",
        "sweep/noyaml.yaml": "# @package _global_\nseed: [0, 1\n",
        "sweep/twice.yaml": "# @package _global_\nseed: 1\nseed: 2\n",
    }
    for name, text in own.items():
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_text(text)
    (tmp_path / "theirs.py").write_text("def digits(size): ...\ndef Net(width): ...\nclass Largest: ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(interrupts, "leave_when_interrupted", lambda *_: None)

    def typed(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["orchestrator", *arguments, "dry_run=true"])
        with pytest.raises(SystemExit) as ended:
            command_line.main()
        assert ended.value.code == 2
        assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "theirs.py"], "nothing was started"
        return capsys.readouterr().err

    yield typed
    GlobalHydra.instance().clear()


OWN = ("--config-dir", "mine")


TOGETHER: dict[tuple[str, ...], dict[str, str]] = {
    (): {
        "schedule.sparsty=0.5": "`schedule.sparsty` (=0.5) is not a key of the configuration; did you mean `schedule.",
        "method.amount=0.2": "`method.amount` (=0.2) is not a key of the configuration; did you mean `schedule.am",
        "schdule.rounds=2": "did you mean `schedule.rounds`?",
        "retyr_failed=true": "did you mean `retry_failed`?",
        "epochs=3": "`epochs` (=3) is not a key of the configuration; did you mean `train.epochs` or `finetune.ep",
        "foo=1": "To add it as a variable, write +foo=1.",
        "finetune.epochs='${foo}'": "",
        "sweep=random_amounts": "`sweep` (=random_amounts) adds a choice; write +sweep=random_amounts.",
        "+tracking=none": "`tracking` (=none) already has a choice; leave out the +.",
        "model=1.5": "`model` (=1.5) must be the name of a choice",
        "data=foo": f"with DIR/data/foo.yaml. The options are {', '.join(sorted([*DATA, 'own']))}.",
        "~foos": "`~foos` removes a key that is absent, null or needed",
        "~train.epochs": "`~train.epochs` removes a key that is absent, null or needed by every trial",
        "train.optimizer=adam": "choose it with `optimizer@train.optimizer=adam`.",
        "scheduler=step": "`scheduler` is a part of `train` and of `finetune`; choose it with `scheduler@train.sch",
        "train.loss._target_=torch.nn.MSELoss": "takes this key, write +train.loss._target_=torch.nn.MSELoss.",
        "train.scheduler={gamma: 1}": "has new keys for the existing mapping; write +train.scheduler={gamma: 1}.",
        "schedule.kind=[1]": "`schedule.kind` (=[1]) must be text; try several with -m schedule.kind=1.",
        "finetune.steps=x": "`finetune.steps` (=x) must be an integer, or null.",
        "schedule.sparsity=90%": "`schedule.sparsity` (=90%) must be a number, or null; write 0.9.",
        "finetune.batch_size=1..3": "(=1..3) must be an integer; try each with -m 'finetune.batch_size=range(1,4)'.",
        "finetune.clip_norm=1.2.3%": "`finetune.clip_norm` (=1.2.3%) must be a number, or null.",
        "finetune.eval_every=50%": "`finetune.eval_every` (=50%) must be an integer, or null.",
        "modle=ok": "`modle` (=ok) is not a key of the configuration; did you mean `model`?",
        "prune.exclude=conv1.*": "`prune.exclude` (=conv1.*) must be a list of text, as in ['conv1.*']; pass prune.e",
        "prune.types=null": "`prune.types` (=null) must be a list of text, as in ['conv1.*']; leave it out for the",
        "finetune.optimizer=torch.optim.Adam": "choose it with `finetune.optimizer._target_=torch.optim.Adam`.",
        "seed=0,": "`seed=0,` cannot be parsed: a setting is key=value; separate several values by commas",
        "1": "`1` cannot be parsed: a setting is key=value",
    },
    ("+foo=1",): {
        "+sweep=snpi": "`sweep` (=snpi) must be an option; did you mean reproduce/snip? For one of your own, pass "
        "--config-dir=DIR with DIR/sweep/snpi.yaml. The options are depth_or_width, detector, experts, language_model, "
        "methods, random_amounts, sensitivity, smaller_lm, smollm2, reproduce/",
        "score=gradent": "did you mean gradient? For one of your own, pass --config-dir=DIR with DIR/score/gra",
        "train=${oc.decode:'3'}": "`train` (=${oc.decode:'3'}) must be the name of a choice, as in model=cnn.",
        "optimizer@train.optimizer=adm": "`optimizer` (=adm) must be an option; did you mean adam? For one",
        "+foo=2": "`foo` (=2) already exists; leave out the +.",
        "cluster.resources={GPU: 1}": "`cluster.resources` must not hold GPU; pass cluster.gpus_per_trial=1.",
    },
    ("finetune.steps=2", "train.epochs=2"): {
        "+sweep=reproduce/snpi": "`sweep` (=reproduce/snpi) must be an option; did you mean reproduce/snip? For",
        "+train.epochs=3": "`train.epochs` (=3) already exists; leave out the +.",
        "train.batch_size=2x": "`train.batch_size` (=2x) must be an integer.",
        "train.batch_size=2": "",
        "finetune.steps=ten": "`finetune.steps` (=ten) must be an integer, or null.",
    },
    (*OWN, "+sweep=mysweep", "data=mydigits", "method=mymethod"): {
        "data.val_fraction=0.3": "is a key of every `data` that its file leaves out; write +data.val_fraction=0.3.",
        "data.sort=true": "`data` has the keys _target_, size. If your `data` takes this key, write +data.sort=true.",
        "model.weights=plain.pt": "is a key of every `model` that its file leaves out; write +model.weights=plain.pt.",
        "model.wdth=8": "did you mean `model.width`? `model` has the keys _target_, width.",
        "method.scope=global": "`method.scope` (=global) is a group; pass scope=global.",
    },
    ("-m", "method=ln_structured,random_structured"): {
        "+model.input_shape=3": "`model.input_shape` (=3) must be a list of integers, as in [64,32], or null; pass mod",
        "model.channels.0=x": "`model.channels.0` (=x) cannot be set: Value 'x' of type 'str' could not be converted",
        "method.dm=1": "did you mean `method.dim`?",
    },
    ("-m", "method=ln_structured,identity"): {
        "method.dim=1": "`method.dim` (=1) is a key of only some choices of `method`; write ++method.dim=1.",
    },
}
"""Command line -> further mistakes on it, and their explanations."""


@sampled(3)
@pytest.mark.parametrize("line", TOGETHER)
def test_all_mistakes_that_hydra_sees_are_answered_at_once(ask: Ask, line: tuple[str, ...]) -> None:
    typed = ask if any(each.startswith("-") for each in line) else told
    answers = typed(*line, *TOGETHER[line])

    assert [answer for answer in TOGETHER[line].values() if answer not in answers] == [], answers
    assert answers.count("\n") == len(list(filter(None, TOGETHER[line].values())))


def test_an_absent_choice_hides_no_other_mistake() -> None:
    answers = told("+sweep=reproduce/snpi", "optimizer@train.optimizer=adm", "modle=1")

    assert "`sweep` (=reproduce/snpi)" in answers
    assert "`optimizer` (=adm)" in answers
    assert "`modle` (=1)" in answers


@sampled(2)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["~sweep"], "`~sweep` removes a key that is absent, null or needed by every trial"),
        (["-m", "model=cnn,lenet5", "method=1.5"], "`method` (=1.5) must be the name of a choice, as in model=cnn."),
        (["-m", "method=1.5,identity", "~restart", "sed=1"], "`method` (=1.5,identity) must be the name of a choice"),
        (["model={classes: 3}", "~restart", "method=1.5"], "`method` (=1.5) must be the name of a choice"),
    ],
)
def test_a_choice_that_is_in_order_is_not_blamed(ask: Ask, arguments: list[str], said: str) -> None:
    answers = ask(*arguments) if "-m" in arguments else told(*arguments)

    assert said in answers
    assert "`model`" not in answers
    assert "`~restart`" not in answers


@pytest.mark.parametrize(("value", "name", "said"), [("x", "_target_", "x"), ("{a: 1}", "GPU", "{'a': 1}")])
def test_a_mapping_that_hydra_refuses_is_held_to_its_rules(value: str, name: str, said: str) -> None:
    answer = told(f"cluster.resources={{{name}: {value}}}")

    assert f"`cluster.resources.{name}` (={said}) must be a number; pass +cluster.resources.{name}=1." in answer


@pytest.mark.parametrize(("kind", "of"), [("digits", ", not of digits"), ("${data}", ""), ("${cluster}", "")])
def test_a_key_of_another_choice_is_known_beside_an_interpolation_without_a_value(kind: str, of: str) -> None:
    answer = told(f"data.kind={kind}", "data.block=null")

    assert f"`data.block` (=null) is a key of data=text{of}; pass data=text." in answer


def test_what_a_wrong_choice_would_have_is_not_judged() -> None:
    assert "method.dim" not in told("method=foo", "method.dim=1")


RULES: tuple[dict[str, str], ...] = (
    {
        "+widht=1": "`widht` (=1) is not a key of the configuration, and no other key refers to it",
        "prune.include=[[1]]": "`prune.include` (=[[1]]) must be a list of text, as in ['conv1.*'].",
        "prune.exclude=${seed}": "`prune.exclude` (=0) must be a list of text",
        "prune.parameters=${oc.decode:'3'}": "`prune.parameters` (=3) must be a list of text",
        "cluster.resources=${model.classes}": "`cluster.resources` (=None) must be a mapping, as in {key: value}.",
    },
    {
        "+store.oaptions.x=1": "`store.oaptions` (={'x': 1}) is not a key; the keys are keep, max_bytes, options, uri.",
        "tracking.uri=/nowhere/m.db": "`tracking.uri` (=/nowhere/m.db) must be an address; pass http://host:5000 for",
        "+train.optimizer.depends=[x]": "`train.optimizer.depends` (=['x']) is not read there; pass `train.depen",
    },
    {"schedule=${model.hidden}": "`schedule` (=${model.hidden}) cannot be resolved: "},
    {"prune=${model.hidden}": "`prune` (=[]) must be a mapping of the keys types, parameters, include"},
    {"method=${seed}": "`method`"},
)
"""Mistakes that Hydra accepts -> their explanations, all of a line at once."""


@pytest.mark.parametrize("line", RULES, ids=lambda line: next(iter(line)))
def test_what_hydra_takes_is_held_to_types_and_rules(line: dict[str, str]) -> None:
    answers = told(*line)

    assert [answer for answer in line.values() if answer not in answers] == [], answers


@sampled(8)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*OWN, "model=broken"], "`model` (=broken) cannot be resolved: Interpolation key 'no.such' not found; check"),
        (["--config-dir", "nowhere", "seed=1"], "`--config-dir` (=nowhere) must be an existing directory"),
        (
            [*OWN, "+sweep=unheaded"],
            "Could not override 'model@sweep.model'; the first line of a preset must be `# @package",
        ),
        (
            [*OWN, "method=unheaded"],
            "method/unheaded.yaml cannot be composed: Could not override 'score@method.score'; the first line of a fil",
        ),
        ([*OWN, "+sweep=noyaml"], "sweep/noyaml.yaml, line 3, is not valid YAML (while parsing a flow sequence, exp"),
        (
            ["deploy=[shrink,onnx]"],
            "`deploy` (=[shrink,onnx]) must be one choice, as the last one would replace the others",
        ),
        (["-m", "deploy=[shrink,onnx]", "seed=0,1"], "; pass deploy.formats=[shrink,onnx]."),
        ([*OWN, "+sweep=twice"], "sweep/twice.yaml, line 3: the key `seed` appears twice; remove one of the two."),
        (["seed", "=", "3"], "`seed = 3`: a setting has no spaces around its equals sign; write seed=3."),
        (["-m", "seed=", "0,1"], "`seed= 0,1`: a setting has no spaces around its equals sign; write seed=0,1."),
        (["model=cnn", "name", "=a b"], "a setting has no spaces around its equals sign; write 'name=a b'."),
        (["seed=0,1"], "brackets if the key takes a list.\n"),
        (["-m", "train.epochs=20", "seed=0,1", "++train.epochs=2x"], "`train.epochs` (=2x) must be an integer, or n"),
        (
            [*OWN, "method=targetless"],
            "names no class or function; add `_target_: package.Thing` to its file, or method._",
        ),
        (
            [*OWN, "method=keys_only"],
            "`method.amount` (=0.5) is an argument, but `method` names no class; add `_target_: ",
        ),
        (
            [*OWN, "+sweep=foo"],
            "The options are mysweep, noyaml, twice, unheaded, depth_or_width, detector, experts, language_model, ",
        ),
        (
            ["search=none", "search.first=7"],
            "`search.first` (=7) is a key of search=halving or frontier, not of none; pass search=halving.",
        ),
        (["-m", "seed=${no.such}", "train.epochs=1,2"], "`seed` (=${no.such}) cannot be resolved: Interpolation key"),
        (["+sweep=random_amounts", "seed=range(0)"], "`seed` (=range(0)) is an empty axis"),
        (["--dry-run"], "`--dry-run` is not an option; a setting has no dashes and an equals sign: dry_run=..."),
        (["--configdir", "mine"], "`--configdir` is not an option; did you mean --config-dir?"),
        (["--sweep=random_amounts"], "an equals sign: +sweep=random_amounts"),
        (
            ["stor", "list"],
            "`stor` is not a command, and a setting is key=value; did you mean store? They are compare,",
        ),
    ],
)
def test_a_mistake_is_answered_with_what_to_do(ask: Ask, arguments: list[str], said: str) -> None:
    assert said in ask(*arguments)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["train.optimizer.lr=0,05"], "if the key takes a list; for a decimal number, write 0.05."),
        (["schedule.sparsity=0,9"], "if the key takes a list; for a decimal number, write 0.9."),
        (["schedule.sparsity=0.5,0.9"], "`schedule.sparsity` (=0.5,0.9) has several values; add"),
        (["train.epochs=2", "train.epochs=1,2"], "`train.epochs` (=1,2) has several values; add"),
        (["seed=???"], "`seed` (=???) has no value; give it one."),
    ],
)
def test_a_value_is_answered_with_what_to_type(settings: list[str], said: str) -> None:
    assert said in told(*settings)


PRESETS: dict[str, str] = {
    "schedule: {round: 2}": "`schedule.round` is not a key of the configuration; did you mean `schedule.rounds`? `sch",
    "shedule: {rounds: 2}": "`shedule` is not a key of the configuration; did you mean `schedule`?",
    "train: {optimiser: {lr: 2}}": "did you mean `train.optimizer`? `train` has the keys ",
    "train: {lr: 2}": "did you mean `train.optimizer.lr`",
    "train.epochs: 3": "`train.epochs` is not a key: keys of a file are nested; write `train: {epochs: ...}`.",
    "default: [override /model: cnn]": "`default` is not a key of the configuration; did you mean `defaults`?",
    "train: {epochs: 2.5}": "`train.epochs` (=2.5) must be an integer, or null.",
    "schedule: {sparsity: [0.5,0.8]}": "an axis: write `schedule.sparsity: 0.5,0.8` under hydra.sweeper.",
    "seed: 0,1": "`seed` (=0,1) must be an integer; several values are an axis: write `seed: 0,1` under hydra",
    "score: l2": "`score` (=l2) must be a mapping; write a choice into `defaults`, as in `- override /score: l2`.",
    "model: net": "`model` (=net) must be a mapping; write a choice into `defaults`, as in `- override /model: net`.",
    "train: default": "`train or finetune` (=default) must be a mapping; ",
    "sweeper: {params: {}}": "`sweeper` is not a key of the configuration; did you mean `hydra.sweeper`?",
    "hydra: {mode: multirun}": "`hydra.mode` (=multirun) must be one of RUN, MULTIRUN.",
    "defaults: [override /model: mpl]": "`model` (=mpl) must be an option; did you mean mlp? For one of your own",
    "prune: {exclude: abc}": "`prune.exclude` must be a list of text, as in ['conv1.*']; put the value into brackets.",
    "defaults: [override /scop: global]": "`/scop` is not a group; did you mean `/scope`?",
    "defaults: [/scop: global]": "`/scop` is not a group; did you mean `/scope`?",
    "defaults: [override scope: global]": "`scope` needs a slash, or Hydra looks for it in sweep/; write `override /sc",
    "defaults: [override /model]": "`override /model` has no choice; add one, as in `override /model: NAME`.",
    "defaults: [override /optimizer: adam]": "write `override /optimizer@train.optimizer: ...`.",
    "- a": "has a list in place of a mapping, at its top level or under a key such as hydra.sweeper.params; write `key",
    "hydra: {sweeper: {params: [seed]}}": "has a list in place of a mapping",
    "defaults: override": "`defaults` must be a list, but is a str; write `defaults: [override /GROUP: NAME]`.",
    "defaults: [overide /model: lenet5]": "`model` already has a choice; write `override /model: lenet5`, with",
    "defaults: [override /finetune/optimizer: adamw]": "write `override /optimizer@finetune.optimizer: ...`.",
}
"""Content of a preset after its first line -> its explanation."""


@pytest.mark.slow
def test_what_is_wrong_in_a_preset_is_told_with_what_was_meant(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    folder.mkdir()
    hydra_options.register()
    with initialize_config_dir(str(command_line.CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()

        def compose(settings: list[str]) -> DictConfig:
            where = f"hydra.searchpath=[file://{tmp_path}]"
            return loader.load_configuration("config", [where, *settings], RunMode.RUN)

        sound, listed = compose([]), loader.list_groups("")
        for number, (text, said) in enumerate(PRESETS.items()):
            (folder / f"p{number}.yaml").write_text(f"# @package _global_\n{text}\n")
            with pytest.raises((HydraException, ValueError)) as refused:
                compose([f"+sweep=p{number}"])
            answer = explain(refused.value, lambda _: sound, [f"+sweep=p{number}"], listed)
            assert answer.startswith(f"sweep/p{number}.yaml"), text
            assert said in answer, (text, answer)


def test_a_preset_that_cannot_be_read_is_named(ask: Ask) -> None:
    for content, said in (
        (b"# @package _global_\nseed: \xff\xfe\n", "is not in UTF-8: it contains the byte 0xff; save it in UTF-8."),
        (
            b"# @package _global_\ndefaults: [/sweep/mysweep]\n",
            "its `defaults` lead back to the file itself; remove that line.",
        ),
    ):
        Path("mine/sweep/mysweep.yaml").write_bytes(content)
        answer = ask(*OWN, "+sweep=mysweep")
        assert answer.startswith("sweep/mysweep.yaml ")
        assert answer.endswith(f"{said}\n")


@pytest.mark.slow
def test_an_axis_of_a_preset_is_told_to_have_no_brackets(ask: Ask) -> None:
    Path("mine/sweep/mysweep.yaml").write_text(
        "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {schedule.sparsity: [0.5, 0.8]}}}\n"
    )
    assert "or null; an axis of a preset has no brackets: schedule.sparsity: 0.5,0.8." in ask(*OWN, "+sweep=mysweep")


@pytest.mark.slow
def test_what_the_axes_of_a_preset_cannot_be_is_told(ask: Ask) -> None:
    for axes, said in (
        ("params: {seed: 'range('}", "sweep/mysweep.yaml: the axis `seed: range(` cannot be parsed; write its values"),
        (
            "params: {train: {epochs: '1,2'}}",
            "sweep/mysweep.yaml: `train` holds keys, but an axis has one full key: train.epochs: VALUE",
        ),
        ("parms: {seed: '0,1'}", "`hydra.sweeper.parms` is not a key; write the axes of a preset under `hydra.sw"),
    ):
        Path("mine/sweep/mysweep.yaml").write_text(
            f"# @package _global_\nhydra: {{mode: MULTIRUN, sweeper: {{{axes}}}}}\n"
        )
        assert said in ask(*OWN, "+sweep=mysweep")


@pytest.mark.slow
def test_axes_of_a_preset_that_nothing_would_run_are_refused(ask: Ask) -> None:
    Path("mine/sweep/mysweep.yaml").write_text("# @package _global_\nhydra: {sweeper: {params: {seed: '0,1'}}}\n")
    said = "`hydra.sweeper.params` has the axes seed, which a single run ignores; add `mode: MULTIRUN` under"
    assert said in ask(*OWN, "+sweep=mysweep")
    assert said not in ask(*OWN, "+sweep=mysweep", "hydra.mode=RUN", "schedule.rounds=0")


@sampled(2)
@pytest.mark.parametrize("mode", ["RUN", "MULTIRUN"])
def test_a_misspelled_override_of_a_preset_is_refused(ask: Ask, mode: str) -> None:
    text = f"# @package _global_\ndefaults: [overide /model: cnn]\nhydra: {{mode: {mode}}}\n"
    Path("mine/sweep/mysweep.yaml").write_text(text)
    said = "mine/sweep/mysweep.yaml: `overide` (in `overide /model`) must be override or optional; write `override /mod"
    assert said in ask(*OWN, "+sweep=mysweep")


@pytest.mark.parametrize(
    ("linked", "typed"),
    [(True, ("score=snip",)), (False, ("-m", "score=snip,magnitude")), (False, ("-m", "seed=0,1"))],
)
def test_a_file_on_the_search_path_that_is_called_as_an_option_of_ours_is_refused(
    ask: Ask, linked: bool, typed: tuple[str, ...]
) -> None:
    folder = Path("mine/other/score")
    folder.mkdir(parents=True)
    (folder / "snip.yaml").write_text("kind: magnitude\n")
    if linked:
        (Path("mine") / "score").symlink_to(folder.absolute())
    where = OWN if linked else (f"hydra.searchpath=[file://{folder.parent.absolute()}]",)

    assert "snip.yaml has the name of the built-in option score=snip, and would hide it or be hidden" in ask(
        *where, *typed
    )


@pytest.mark.slow
def test_an_axis_that_is_no_key_is_told_once(ask: Ask) -> None:
    assert ask("-m", "sed=range(50)").count("is not a key") == 1


@pytest.mark.slow
def test_settings_and_options_stand_in_any_order(ask: Ask) -> None:
    assert "2 of 2 trials cannot be planned" in ask("schedule.rounds=0", "-m", "seed=0,1", *OWN, "model=mynet")


def test_a_loss_of_ones_own_is_a_mapping(ask: Ask) -> None:
    answer = ask("train.loss={_target_: torch.nn.NoLoss}", "++finetune.loss={_target_: theirs.no_loss, width: 3}")

    assert "`finetune.loss._target_` (=theirs.no_loss) is not defined" in answer


def test_a_margin_in_points_is_refused() -> None:
    said = "`compare.margin` (=2.0) must lie in [0, 1): accuracy is a fraction; pass 0.01 for one point."
    assert said in told("compare.margin=2", "tracking=none")


@pytest.mark.slow
def test_several_presets_in_one_command_are_refused_as_presets(ask: Ask) -> None:
    said = ask("-m", "+sweep=random_amounts,methods")
    assert "`+sweep` (=random_amounts,methods) must be one preset" in said
