"""Rules over several settings of a trial: combinations without a meaning, each with the setting to change.

The rules of one value stand at its field in `orchestrator.config`. What the engine refuses is told in its words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from orchestrator.catalogue.data import DATA
from orchestrator.catalogue.formats import FORMATS
from orchestrator.catalogue.models import MODELS
from orchestrator.catalogue.tasks import TASKS
from orchestrator.config import schema
from orchestrator.config.parallel import MOST_PROCESSES, Parallel, processes
from orchestrator.config.round_schema import is_identity, without_file
from orchestrator.config.schema import Config, objectives
from orchestrator.config.training import Train, place_violations, row_of
from orchestrator.core.metrics import fraction_fault
from orchestrator.core.plain_data import read_as
from orchestrator.core.restart_kinds import CONTROLS, RESTARTS
from orchestrator.core.specs import StageFields
from orchestrator.trial.choices import RANKING, choices_of, decides_itself, order_of, prunes_channels, sentence
from orchestrator.trial.restarts import epochs_of, place, restart_of
from pruning.catalogue.dynamics import DYNAMICS, DynamicsRow
from pruning.choices import axes
from pruning.choices.axes import TRANSFORMER_UNITS
from pruning.choices.combining import Choices
from pruning.choices.published import PUBLISHED
from pruning.refused import Refused

WHOLE = ("channel", "group", *TRANSFORMER_UNITS)
"""Units that are whole channels, or whole parts of a transformer."""


def violations(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each rule that a plain, resolved trial configuration breaks: key, value, rule and remedy.

    Settings are checked together once each is right alone.
    """
    if alone := [*schema.violations(config)]:
        yield from alone
        return
    trial = read_as(Config, config)
    for rule in (_objective, _deploy, _given_once, _labels, _splits, _text, _margin, _taught_and_low_rank, _processes):
        yield from rule(trial)
    steps: tuple[Callable[[Config], Iterator[str]], ...] = (_choices, _dynamics, _restart)
    yield from next((told for rule in steps if (told := [*rule(trial)])), ())


def choices_of_trial(trial: Config) -> Choices:
    """Return the choices of a trial's rounds; raise `Refused` for choices that conflict."""
    fields = {name: getattr(trial, name) for name in ("method", "score", "dynamics", "repair")}
    fields |= {"unit": vars(trial.unit), "scope": without_file(vars(trial.scope))}
    fields |= {"inner": trial.schedule.inner, "order": _order(trial)}
    fields["restart"] = {"control": trial.restart.control}
    return choices_of(StageFields.of(fields))


def _order(trial: Config) -> str:
    parts = {name: vars(getattr(trial, name)) for name in ("schedule", "unit", "scope")}
    return order_of({**parts, "score": trial.score, "method": trial.method})


def _choices(trial: Config) -> Iterator[str]:
    """Yield a sentence for each choice that has no meaning, alone or together with others."""
    schedule, method = trial.schedule, trial.method
    if method.get("_target_") and not method.get("kind") and method.get("name") in PUBLISHED:
        yield (
            f"`method` (={method['name']}) and `method._target_` (={method['_target_']}) are both given; leave out "
            f"method={method['name']}, or pass another `method.name`."
        )
        return
    if decides_itself(method) and (told := [*_of_a_class(trial)]):
        yield from told
        return
    try:
        axes.Unit(**vars(trial.unit))  # a class that decides reads none, and may not get a wrong one either
        axes.Scope(**without_file(vars(trial.scope)))  # a stage's fields would raise without naming the key
        choices = choices_of_trial(trial)
    except Refused as error:
        yield sentence(error)
        return
    if decides_itself(method):
        return
    of_magnitudes = method.get("kind") == RANKING and trial.score.get("kind") == "magnitude"
    if schedule.amount is not None and not of_magnitudes:
        yield (
            f"`schedule.amount` (={schedule.amount}) is for a class such as method={RANKING}, but "
            f"`score` (={_named(trial.score)}) ranks to a sparsity; pass schedule.sparsity and "
            "schedule.amount=null."
        )
    elif schedule.amount is not None:
        yield from _of_a_class(trial)
    control = CONTROLS[trial.restart.control]
    score = trial.score
    if choices.schedule.order == "sequential" and score.get("examples") is None and score.get("per_class") is None:
        yield (
            "`score.examples` (=null) must be given, or `score.per_class`: the sequential order reads data; pass "
            "score.examples=128."
        )
    if choices.schedule.order != "sequential" and score.get("calibrate_all_experts"):
        yield (
            "`score.calibrate_all_experts` (=true) is for pruning layer by layer, as by method=wanda,sparsegpt,alps; "
            "leave it out."
        )
    if choices.schedule.order == "sequential" and control.shuffles:
        yield (
            f"`restart.control` (={control.name}) shuffles a mask, but in the sequential order the weights are updated "
            "for it; pass restart.control=none, or method=random for a control, or schedule.order=at_once for a score."
        )
    scope, rounds, sparsity = choices.scope, schedule.rounds, schedule.sparsity
    if scope.kind == "window":
        exact = 1 - scope.n / scope.m
        if rounds > 1 or (sparsity is not None and abs(sparsity - exact) > 1e-9):
            yield (
                f"`schedule.sparsity` (={sparsity}) over `schedule.rounds` (={rounds}) must be {exact:g} in one round: "
                f"scope=window keeps {scope.n} of each {scope.m}; pass schedule=one_shot schedule.sparsity={exact:g}."
            )
    by_file, sized = trial.scope.densities_file is not None, trial.unit.kind == "sizes"
    if sparsity is not None and (sized or (scope.allocation == "given" and not by_file)):
        given = "unit=sizes, where its sizes" if sized else "scope.allocation=given, where `scope.densities`"
        yield (
            f"`schedule.sparsity` (={sparsity}) must be null with {given} define the survivors; pass "
            f"schedule.sparsity=null{'' if sized else ', or the densities by `scope.densities_file`'}."
        )


def _of_a_class(trial: Config) -> Iterator[str]:
    """Yield a sentence for each choice that the class of a method does not read."""
    plain, method, scope = Choices(), trial.method, trial.scope
    named = method.get("name") or method.get("kind") or method.get("_target_")
    if trial.schedule.amount is not None and not decides_itself(method):
        named = f"{named} with schedule.amount"
    chosen = {
        "score": (_named(trial.score), plain.score.kind),
        "unit": (trial.unit.kind, plain.unit.kind),
        "scope.allocation": (scope.allocation, plain.scope.allocation),
        "dynamics": (_named(trial.dynamics), plain.dynamics.kind),
        "repair": (trial.repair["kind"], plain.repair.kind),
        "schedule.inner": (trial.schedule.inner, plain.schedule.inner),
        "schedule.order": (_order(trial), plain.schedule.order),
    }
    for name, (value, default) in chosen.items():
        if value != default:
            yield (
                f"`{name}` (={value}) is for ranking by a score, but `method` (={named}) is a class that decides "
                f"itself; pass method=magnitude, or leave out `{name}`."
            )
    if scope.kind not in ("layer", "global"):
        yield (
            f"`scope` (={scope.kind}) is for ranking by a score, but `method` (={named}) is a class that takes only "
            "layer or global; pass method=magnitude, or another scope."
        )
    if (control := CONTROLS[trial.restart.control]).inverts:
        yield (
            f"`restart.control` (={control.name}) inverts scores, but `method` (={named}) has no scores; pass "
            "method=magnitude, or another control."
        )
    if scope.kind == "global" and prunes_channels(method):
        yield (
            f"`scope` (=global) ranks entries of all tensors, but {method['kind']} prunes whole channels of one "
            "tensor; pass scope=layer, or method=magnitude unit=channel."
        )


def _named(score: Mapping[str, Any]) -> Any:
    return score.get("kind") or score.get("_target_")


def _dynamics(trial: Config) -> Iterator[str]:
    """Yield a sentence for each setting that does not go together with masks that change within a training."""
    row, at = row_of(trial.dynamics), trial.schedule.at
    assert row is not None
    if not row.in_training:
        if at == "during":
            yield (
                f"`schedule.at` (=during) needs a dynamics that changes masks within the training, but `dynamics` is "
                f"{row.name}; pass dynamics=rigl, for example, or schedule.at=start."
            )
        return
    if at == "start":
        yield (
            f"`schedule.at` (=start) prunes before the training, but dynamics={row.name} changes masks within it; pass "
            "schedule.at=during, or schedule.at=trained to change them while the trained network is fine-tuned."
        )
    if trial.prune.holding == "hooks":
        yield (
            f"`prune.holding` (=hooks) holds fixed masks, but dynamics={row.name} changes them; pass "
            "prune.holding=keeper."
        )
    if (control := trial.restart.control) != "none":
        yield (
            f"`restart.control` (={control}) changes masks or weights of a round before its training, but "
            f"dynamics={row.name} changes the masks within it; pass restart.control=none, and dynamics=static for a "
            "control with a fixed mask."
        )
    yield from _length(trial, row)


def _length(trial: Config, row: DynamicsRow) -> Iterator[str]:
    """Yield the broken rules of the length of the training in which masks change."""
    restarted = not RESTARTS[trial.restart.weights].keeps or trial.restart.rates is not None
    where = "train" if trial.schedule.at != "trained" or restarted else "finetune"
    training = trial.train if where == "train" else trial.finetune
    if where == "finetune" and not (training.epochs or training.steps):
        yield (
            f"`finetune` trains nothing (finetune.epochs=0), but dynamics={row.name} changes masks while it trains; "
            "pass finetune.epochs=5, for example, or schedule.at=during."
        )
    if training.steps and not restarted:
        yield from place_violations(trial.dynamics, training.steps, f"{where}.steps")


def _taught_and_low_rank(trial: Config) -> Iterator[str]:
    """Yield a sentence for each setting of a fine-tuning that does not go together with others."""
    if trial.train.teacher is not None:
        yield (
            f"`train.teacher` (={trial.train.teacher}) must be null, as `train` trains the dense network; "
            f"pass finetune.teacher={trial.train.teacher}."
        )
    if (rank := trial.train.lora_rank) is not None:
        yield (
            f"`train.lora_rank` (={rank}) must be null, as `train` trains the dense network; pass "
            f"finetune.lora_rank={rank}."
        )
    if (rank := trial.finetune.lora_rank) is None:
        return
    if (row := row_of(trial.dynamics)) is not None and row.in_training:
        yield (
            f"`finetune.lora_rank` (={rank}) trains under fixed masks, but dynamics={row.name} changes them; pass "
            "finetune.lora_rank=null."
        )
    if trial.prune.holding == "hooks":
        yield (
            f"`finetune.lora_rank` (={rank}) holds the masks in its updates, not by hooks; pass prune.holding=keeper."
        )


def _given_once(trial: Config) -> Iterator[str]:
    """Yield an error unless exactly one of sparsity and amount is given, if the scope needs one of them."""
    sparsity, amount, scope = trial.schedule.sparsity, trial.schedule.amount, trial.scope
    dynamics = DYNAMICS.get(str(trial.dynamics.get("kind")))
    if is_identity(trial.method):
        return
    if dynamics is not None and not dynamics.has_target and amount is None:
        if sparsity is not None:
            yield (
                f"`schedule.sparsity` (={sparsity}) must be null with dynamics={dynamics.name}, whose threshold and "
                "penalty decide the sparsity; pass schedule.sparsity=null."
            )
        return
    if amount is None and (scope.kind == "window" or scope.allocation == "given" or trial.unit.kind == "sizes"):
        return
    if (sparsity is None) == (amount is None):
        given, remedy = "neither", "the overall sparsity to end at, or the amount that each round takes."
        if amount is not None:
            given, remedy = "both", "add `schedule.sparsity=null` (a preset may set it) or `schedule.amount=null`."
        yield (
            f"`schedule.sparsity` (={sparsity}) and `schedule.amount` (={amount}) are {given} given; pass exactly one: "
            f"{remedy}"
        )


def _processes(trial: Config) -> Iterator[str]:
    """Yield a sentence for each rule that the processes of a trial break."""
    parallel, cluster = trial.parallel, trial.cluster
    count = processes({"parallel": vars(parallel), "cluster": vars(cluster)})
    gpus, cpus = cluster.gpus_per_trial, cluster.cpus_per_trial
    if parallel.kind == "none":
        yield from _for_one(parallel, gpus)
        return
    if count > MOST_PROCESSES:
        yield f"`parallel.processes` (={count}) must be at most {MOST_PROCESSES}; pass the GPUs of a trial, or null."
    if gpus and gpus != count:
        yield (
            f"`cluster.gpus_per_trial` (={gpus:g}) must be {count}, a whole GPU for each of `parallel.processes`; pass "
            f"cluster.gpus_per_trial={count}, or parallel.processes=null."
        )
    if not gpus and count > max(1, cpus):
        yield (
            f"`parallel.processes` (={count}) must be at most {cpus:g}, the CPUs of a trial; pass "
            f"cluster.cpus_per_trial={count}, or fewer processes."
        )
    if count > 1 and cluster.kind == "inline":
        yield (
            f"`cluster.kind` (=inline) runs trials in this process, and `parallel.processes` (={count}) asks for more; "
            "pass cluster=local, or parallel=none."
        )
    for name, training in (("train", trial.train), ("finetune", trial.finetune)):
        yield from _shared_training(name, training, count)


def _for_one(parallel: Parallel, gpus: float) -> Iterator[str]:
    if parallel.sync_batch_norm:
        yield (
            "`parallel.sync_batch_norm` (=true) needs parallel=ddp: one process normalises by all examples anyway; "
            "pass parallel=ddp, or leave it out."
        )
    if (parallel.processes or 1) > 1:
        yield (
            f"`parallel.processes` (={parallel.processes}) needs parallel=ddp: one process trains by default; pass "
            "parallel=ddp, and to compare numbers of processes parallel=ddp parallel.processes=1,2."
        )
    if gpus > 1:
        yield (
            f"`cluster.gpus_per_trial` (={gpus:g}) must be at most 1 for a trial of one process; pass parallel=ddp, "
            "with a process for each GPU, or cluster.gpus_per_trial=1."
        )


def _shared_training(name: str, training: Train, count: int) -> Iterator[str]:
    if training.batch_size < count and (training.epochs or training.steps):
        yield (
            f"`{name}.batch_size` (={training.batch_size}) must be at least {count}, an example for each of "
            f"`parallel.processes`; pass {name}.batch_size={count}, or fewer processes."
        )
    if training.compile and count > 1:
        yield f"`{name}.compile` (=true) works with one process; pass {name}.compile=false, or parallel=none."


def _restart(trial: Config) -> Iterator[str]:
    """Yield a sentence for each broken rule of a configuration's restart."""
    restart, schedule = trial.restart, trial.schedule
    weights, control, rounds = RESTARTS[restart.weights], CONTROLS[restart.control], schedule.rounds
    if weights.at_step != (restart.step is not None):
        among = " or ".join(name for name, row in RESTARTS.items() if row.at_step)
        yield (
            f"`restart.step` (={restart.step}) must be given if and only if `restart.weights` (={weights.name}) is "
            f"{among}; pass restart=rewind restart.step=0, or restart.step=null."
        )
        return
    if schedule.at == "start" and rounds > 1:
        yield (
            f"`schedule.rounds` (={rounds}) must be 1 with schedule.at=start, which prunes a network before its "
            f"training; pass schedule.rounds=1 schedule.inner={rounds} to score several times without training, or "
            "schedule.at=trained restart=rewind restart.step=0 to train in between and rewind to the initialisation."
        )
    if schedule.at == "during" and rounds > 1:
        yield (
            f"`schedule.rounds` (={rounds}) must be 1 with schedule.at=during, where masks change within one training; "
            "pass schedule.rounds=1, or schedule.at=trained to change them while each round fine-tunes."
        )
    if control.shuffles and rounds > 1 and weights.keeps:
        yield (
            f"`restart.control` (={control.name}) would bring back weights that earlier rounds set to zero, with "
            f"restart.weights={weights.name} and `schedule.rounds` (={rounds}); pass restart=rewind, or "
            "schedule.rounds=1."
        )
    method, unit = trial.method, trial.unit.kind
    chosen = decides_itself(method) or schedule.amount is not None
    whole = prunes_channels(method) or method.get("_target_") if chosen else unit in WHOLE
    if control.small and not whole:
        named = f"`method` (={method.get('name')})" if chosen else f"`unit` (={unit})"
        yield (
            f"`restart.control` (={control.name}) trains the dense network that remains without the pruned channels, "
            f"but {named} prunes no whole channels; pass method=magnitude unit=group, or another control."
        )
    if "rates" in restart_of(trial, last=True):
        yield from _retrained(trial)


def _retrained(trial: Config) -> Iterator[str]:
    """Yield the broken rules of rounds that continue from a step of the dense training."""
    train = trial.train
    if not (train.epochs or train.steps):
        yield (
            "With `restart`, schedule.at=start or schedule.at=during, rounds train by `train`, which trains nothing "
            "(train.epochs=0); pass train.epochs=15, for example, or restart=keep schedule.at=trained."
        )
    if trial.finetune.teacher is not None:
        yield (
            f"`finetune.teacher` (={trial.finetune.teacher}) is for rounds that fine-tune, but with `restart`, "
            "schedule.at=start or schedule.at=during they train by `train`; pass finetune.teacher=null."
        )
    if trial.finetune.lora_rank is not None:
        yield (
            f"`finetune.lora_rank` (={trial.finetune.lora_rank}) is for rounds that fine-tune, but with "
            "`restart`, schedule.at=start or schedule.at=during they train by `train`; pass finetune.lora_rank=null."
        )
    yield from _place("restart.step", trial.restart.step, train)
    yield from _place("restart.rates", trial.restart.rates, train)


def _place(key: str, asked: Any, train: Train) -> Iterator[str]:
    length = (train.steps if train.epochs is None else train.epochs) or 0
    if isinstance(asked, str) and train.epochs is None:
        yield (
            f"`{key}` (={asked}) counts epochs, but `train.steps` (={length}) gives the length of the training; pass a "
            "step as an int, or a fraction of the training as a float."
        )
    elif (isinstance(asked, str) and epochs_of(asked) > length) or (
        isinstance(asked, int) and train.epochs is None and asked > length
    ):
        unit = "steps" if train.epochs is None else "epochs"
        yield f"`{key}` (={asked}) must be at most `train.{unit}` (={length}); pass fewer."
    if asked and train._target_ is not None and place(asked, train) != 0:
        yield (
            f"`{key}` (={asked}) must be 0 with `train._target_` (={train._target_}): a function of your own "
            "decides its length; pass 0, or train._target_=null for the built-in loop."
        )


def _objective(trial: Config) -> Iterator[str]:
    formats, sizes = trial.deploy.formats, trial.deploy.batch_sizes
    places = [f"{each}/{size}" for each in formats for size in sizes]
    for name in objectives(trial.objective):
        if name is None or not name.startswith("deploy/"):
            continue
        place = name.partition("/")[2].rpartition("/")[0]
        if not formats:
            yield f"`objective` (={name}) needs a deployed network; pass deploy=shrink, or another format."
        elif place and place not in (*formats, *places):
            yield f"`objective` (={name}) must name a format and batch size of `deploy`: {', '.join(places)}."


def _deploy(trial: Config) -> Iterator[str]:
    row = MODELS.get(str(trial.model.get("kind")))
    for name in trial.deploy.formats:
        if name in FORMATS and row is not None and not FORMATS[name].holds(row.packages):
            yield (
                f"`deploy.formats` (={trial.deploy.formats}) holds {name}, which is for networks that "
                f"{FORMATS[name].builder} builds, as model=huggingface, and `model.kind` is {row.name}; pass "
                "deploy=shrink, or another format."
            )


def _labels(trial: Config) -> Iterator[str]:
    """Yield an error for data whose labels are not those of the task."""
    task, data = TASKS.get(str(trial.task.get("kind"))), DATA.get(str(trial.data.get("kind")))
    if task is None or data is None or "" in (task.labelled, data.labelled) or task.labelled == data.labelled:
        return
    rows = TASKS.values()
    fitting = next(row.name for row in rows if row.labelled == data.labelled or (row.of_text and data.of_text))
    yield (
        f"`task` (={task.name}) needs a label for each {task.labelled}, but `data` (={data.name}) has one for each "
        f"{data.labelled}; pass task={fitting}, or other data."
    )


def _splits(trial: Config) -> Iterator[str]:
    """Yield an error for two splits of the user's own files that are the same."""
    row = DATA.get(str(trial.data.get("kind")))
    for first, second in combinations(row.files if row else (), 2):
        place = trial.data[first]
        if place and trial.data[second] and Path(place) == Path(trial.data[second]):
            yield (
                f"`data.{first}` and `data.{second}` are both {place}, but the splits must hold different images; name "
                "other images, or pass data.val=null to cut the validation split from `data.train`."
            )


def _text(trial: Config) -> Iterator[str]:
    """Yield an error for windows of a text that would leave tokens out."""
    row = TASKS.get(str(trial.task.get("kind")))
    if row is None or not row.of_text or trial.data.get("kind") != "text":
        return
    stride, block = trial.task["stride"], trial.data["block"]
    if stride is not None and stride > block:
        yield (
            f"`task.stride` (={stride}) must be at most {block}, the tokens of an example (`data.block`); pass "
            f"task.stride={block}, or a larger data.block."
        )


def _margin(trial: Config) -> Iterator[str]:
    """Yield an error for a margin in points of a built-in task whose primary metric is a fraction."""
    task, margin = TASKS.get(str(trial.task.get("kind"))), trial.compare.margin
    if task and task.fraction and margin is not None and (fault := fraction_fault(task.fraction, margin)):
        yield f"`compare.margin` (={margin}) {fault}"
