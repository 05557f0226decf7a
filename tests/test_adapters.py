"""What each kind of state becomes in a snapshot, and what a restore makes of it; refused and unfit state by name."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import numpy
import pytest
import torch
from support_state import bits, snapshot
from torch import nn
from torch.optim import lr_scheduler

from ckptrt.adapters import adapt
from ckptrt.errors import MismatchError, UsageError

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128, torch.int64, torch.int8, torch.uint8, torch.uint16, torch.uint64, torch.bool,
]  # fmt: skip


def net(seed: int = 0, bias: bool = True) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5, bias=bias), nn.BatchNorm1d(5), nn.Linear(5, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randn(6, 4, generator=generator)

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]


def same_module(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(bits(left[k]) == bits(right[k]) for k in left)


def untouched(state: dict[str, Any], rank: int = 0, world_size: int = 1) -> Any:
    """What a state holds, for comparing before and after."""
    captured = [a.capture() for a in adapt(state, rank, world_size, rng=False)]
    return [([(i.key, bits(i.tensor)) for i in c.items], c.data) for c in captured]


# --- modules


def test_a_module_comes_back_in_place():
    saved, live = net(0), net(1)
    pointers = [p.data_ptr() for p in live.parameters()]
    with snapshot({"model": saved}) as taken:
        taken.load({"model": live})
    assert same_module(saved, live)
    assert [p.data_ptr() for p in live.parameters()] == pointers
    assert all(p.requires_grad and p.is_leaf for p in live.parameters())


class Tied(nn.Module):
    def __init__(self, seed: int, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(6, 3)
        self.head = nn.Linear(3, 6, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def test_tied_weights_are_stored_once_and_stay_tied():
    saved, live = Tied(0), Tied(1)
    with snapshot({"model": saved}) as taken:
        assert [t.key for t in taken.meta().tensors] == ["model.embedding.weight"]
        taken.load({"model": live})
    assert live.head.weight is live.embedding.weight
    assert same_module(saved, live)


def test_tied_weights_may_be_loaded_into_untied_ones_but_not_the_other_way_round():
    with snapshot({"model": Tied(0)}) as taken:
        apart = Tied(1, tied=False)
        taken.load({"model": apart})
        assert same_module(Tied(0), apart)
        assert apart.head.weight is not apart.embedding.weight
    with snapshot({"model": Tied(0, tied=False)}) as taken:
        live = Tied(1)
        before = untouched({"model": live})
        with pytest.raises(MismatchError, match=r"model\.head\.weight shares memory with embedding\.weight"):
            taken.load({"model": live})
        assert untouched({"model": live}) == before


def test_empty_tensors_are_not_taken_for_shared():
    model = nn.Module()
    for name in ("a", "b"):
        model.register_buffer(name, torch.zeros(0, 2))
    with snapshot({"model": model}) as taken:
        assert [t.key for t in taken.meta().tensors] == ["model.a", "model.b"]
        taken.load({"model": copy.deepcopy(model)})


class WithExtras(nn.Module):
    def __init__(self, value: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), float(value)))
        self.register_buffer("table", torch.full((2,), value), persistent=False)
        self.register_buffer("count", torch.tensor(value))
        self.note: Any = (value, {"scale": torch.tensor([float(value)])})

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def test_extra_state_and_buffers_come_back_and_non_persistent_buffers_are_left_alone():
    saved: Any = WithExtras(3)
    live: Any = WithExtras(4)
    weight = live.weight
    with snapshot({"model": saved}) as taken:
        taken.load({"model": live})
    assert live.weight is weight
    assert live.weight.tolist() == [3.0, 3.0]
    assert live.count.item() == 3
    assert live.table.tolist() == [4, 4]
    assert (live.note[0], live.note[1]["scale"].tolist()) == (3, [3.0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_form_of_buffer_comes_back(dtype):
    def build(filled: bool) -> nn.Module:
        flat = torch.arange(64, dtype=torch.uint8)
        source = (flat % 2).to(torch.bool) if dtype is torch.bool else flat.view(dtype)
        forms = {
            "all": source, "one": source[:1], "scalar": source[0], "none": source[:0].view(0, 3),
            "strided": source[::2], "transposed": source[:4].view(2, 2).t(), "row": source[1:3],
        }  # fmt: skip
        model = nn.Module()
        for name, tensor in forms.items():
            blank = torch.zeros_like(tensor, memory_format=torch.preserve_format)
            model.register_buffer(name, tensor.clone() if filled and name != "strided" else blank)
            if filled and name == "strided":
                model.register_buffer(name, tensor)
        return model

    saved, live = build(True), build(False)
    with snapshot({"model": saved}) as taken:
        taken.load({"model": live})
    assert same_module(saved, live)


def test_a_slice_of_something_large_is_stored_as_the_slice():
    large = torch.zeros(1_000_000)
    with snapshot({"d": {"a": large[:10], "b": large[::100_000], "c": large.view(1000, 1000)[3, :10]}}) as taken:
        assert len(taken.image()) < 10_000


def test_expanded_and_conjugated_tensors_are_stored_by_value():
    z = torch.tensor([1 + 2j, 3 - 4j])
    state = {"wide": torch.tensor([1.0, 2.0]).expand(3, 2), "conj": z.conj(), "imag": z.conj().imag, "real": z.real}
    live: dict[str, Any] = {}
    with snapshot({"d": state}) as taken:
        taken.load({"d": live})
    assert {k: v.tolist() for k, v in live.items()} == {k: v.tolist() for k, v in state.items()}


def test_a_buffer_whose_elements_share_memory_is_refused_before_anything_is_loaded():
    saved = nn.Module()
    live: Any = nn.Module()
    saved.register_buffer("first", torch.ones(2))
    live.register_buffer("first", torch.zeros(2))
    saved.register_buffer("wide", torch.arange(6.0).view(3, 2))
    live.register_buffer("wide", torch.zeros(1, 2).expand(3, 2))
    with snapshot({"model": saved}) as taken, pytest.raises(MismatchError, match=r"model\.wide"):
        taken.load({"model": live})
    assert live.first.tolist() == [0.0, 0.0]


class Subclass(torch.Tensor):
    pass


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


REFUSED = {
    "meta": lambda: torch.empty(2, device="meta"),
    "layout": lambda: torch.eye(2).to_sparse(),
    "storage freed": freed,
    "Subclass": lambda: torch.ones(2).as_subclass(Subclass),
    "float4_e2m1fn_x2": lambda: torch.empty(2, dtype=torch.float4_e2m1fn_x2),
}


@pytest.mark.parametrize("word", REFUSED)
@pytest.mark.parametrize("where", ["module", "dict", "optimizer"])
def test_a_tensor_that_cannot_be_stored_is_refused_by_name(where, word):
    tensor = REFUSED[word]()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if where == "module":
        model[0].register_buffer("odd", tensor)
        state: dict[str, Any] = {"model": model}
        name = "model.0.odd"
    elif where == "dict":
        state, name = {"loop": {"a": [tensor]}}, "loop.a.0"
    else:
        optimizer.state[model[0].weight]["odd"] = tensor
        state, name = {"model": model, "optim": optimizer}, "optim.state.0.weight.odd"
    with pytest.raises(UsageError) as caught, snapshot(state):
        pass
    assert name in caught.value.what
    assert word in caught.value.what


# --- what doesn't fit


def test_every_difference_is_listed_and_nothing_is_touched():
    saved, live = net(0), net(1)
    saved[0] = nn.Linear(4, 7)
    saved.register_buffer("only_there", torch.ones(1))
    live.register_buffer("only_here", torch.ones(1))
    live[2].half()
    before = untouched({"model": live})
    with snapshot({"model": saved}) as taken, pytest.raises(MismatchError) as caught:
        taken.load({"model": live})
    assert "missing   model.only_here" in caught.value.what
    assert "extra     model.only_there" in caught.value.what
    del saved.only_there, live.only_here
    with snapshot({"model": saved}) as taken, pytest.raises(MismatchError) as caught:
        taken.load({"model": live})
    assert "model.0.weight   saved (7, 4), here (5, 4)" in caught.value.what
    assert "model.0.bias   saved (7,), here (5,)" in caught.value.what
    assert "model.2.weight   saved torch.float32, here torch.float16" in caught.value.what
    assert "nothing was loaded" in caught.value.safe
    live.register_buffer("only_here", torch.ones(1))
    assert untouched({"model": live}) == before


def test_a_component_too_many_or_too_few_is_named():
    with snapshot({"model": net(), "progress": {"a": 1}}) as taken:
        with pytest.raises(MismatchError, match=r"extra\s+component progress"):
            taken.load({"model": net()})
        with pytest.raises(MismatchError, match=r"missing\s+component ema"):
            taken.load({"model": net(), "progress": {}, "ema": net()})


def test_a_meta_model_is_told_to_materialise():
    with snapshot({"model": net()}) as taken:
        with torch.device("meta"):
            live = net()
        with pytest.raises(MismatchError, match="to_empty"):
            taken.load({"model": live})
        live.to_empty(device="cpu")
        taken.load({"model": live})
        assert same_module(live, net())


def test_state_that_makes_no_sense_is_refused_at_once():
    cases: list[tuple[dict[str, Any], str]] = [
        ({"x": 3}, "'x' is a int"),
        ({"rng": {}}, "'rng'"),
        ({"d": {"model": net(), "samples": 3}}, "'d' mixes"),
        ({"a": {"b": net()}, "a.b": net()}, r"a\.b"),
        ({"a": net(), "a.0": net()}, r"a\.0"),
        ({"m": nn.Linear}, "'m'"),
    ]
    for state, word in cases:
        with pytest.raises(UsageError, match=word):
            adapt(state, 0, 1, rng=True)


def test_a_dict_of_modules_is_taken_apart():
    saved, live = {"parts": {"g": net(0), "d": net(1)}}, {"parts": {"g": net(2), "d": net(3)}}
    with snapshot(saved) as taken:
        taken.load(live)
    assert same_module(saved["parts"]["g"], live["parts"]["g"])
    assert same_module(saved["parts"]["d"], live["parts"]["d"])


# --- optimizers

OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "Adam-lr-in-a-tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "SGD-momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, line_search_fn="strong_wolfe"),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "used"])
def test_training_goes_on_bit_for_bit(kind, warm):
    make = OPTIMIZERS[kind]
    saved, live = net(0), net(1)
    saved_optim, live_optim = make(saved.parameters()), make(live.parameters())
    train(saved, saved_optim, 3)
    if warm:
        train(live, live_optim, 5, seed=9)
    with snapshot({"model": saved, "optim": saved_optim}) as taken:
        taken.load({"model": live, "optim": live_optim})
        assert untouched({"optim": saved_optim, "model": saved}) == untouched({"optim": live_optim, "model": live})
    for model, optimizer in ((saved, saved_optim), (live, live_optim)):
        train(model, optimizer, 3, seed=2)
    assert same_module(saved, live)


def test_saving_before_the_first_step_builds_no_state_and_changes_no_training():
    model, plain = net(0), net(0)
    optimizer, reference = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain))
    with snapshot({"model": model, "optim": optimizer}) as taken:
        assert not optimizer.state
        train(model, optimizer, 1)
        train(plain, reference, 1)
        assert same_module(model, plain)
        assert {float(s["step"]) for s in optimizer.state.values()} == {1.0}
        taken.load({"model": model, "optim": optimizer})
        assert not optimizer.state, "the saved one had none"


def test_restoring_builds_the_state_without_a_dummy_step():
    saved, live = net(0), net(1)
    saved_optim, live_optim = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (saved, live))
    train(saved, saved_optim, 1)
    with snapshot({"model": saved, "optim": saved_optim}) as taken:
        taken.load({"model": live, "optim": live_optim})
    assert {float(s["step"]) for s in live_optim.state.values()} == {1.0}
    assert all(p.grad is None for p in live.parameters())


def test_state_of_frozen_parameters_stays():
    saved, live = net(0), net(1)
    saved_optim, live_optim = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (saved, live))
    train(saved, saved_optim, 2)
    for model in (saved, live):
        model[0].weight.requires_grad_(False)
    with snapshot({"model": saved, "optim": saved_optim}) as taken:
        taken.load({"model": live, "optim": live_optim})
    assert live.get_parameter("0.weight") in live_optim.state
    for model, optimizer in ((saved, saved_optim), (live, live_optim)):
        model[0].weight.requires_grad_(True)
        train(model, optimizer, 2)
    assert same_module(saved, live)


def groups(model: Any, backwards: bool, lrs: tuple[float, float] = (0.1, 0.2)) -> torch.optim.Optimizer:
    first: dict[str, Any] = {"params": list(model[0].parameters()), "lr": lrs[0], "weight_decay": 0.5}
    second: dict[str, Any] = {"params": [*model[1].parameters(), *model[2].parameters()], "lr": lrs[1]}
    if backwards:
        second["params"].reverse()
    return torch.optim.AdamW([second, first] if backwards else [first, second])


def test_groups_follow_names_and_not_positions():
    saved, live = net(0), net(1)
    saved_optim, live_optim = groups(saved, False), groups(live, True, (7.0, 8.0))
    train(saved, saved_optim, 2)
    with snapshot({"model": saved, "optim": saved_optim}) as taken:
        taken.load({"model": live, "optim": live_optim})
    assert [(g["lr"], g["weight_decay"]) for g in live_optim.param_groups] == [(0.2, 0.01), (0.1, 0.5)]
    train(saved, saved_optim, 2)
    train(live, live_optim, 2)
    assert same_module(saved, live)


def test_other_groups_other_parameters_and_other_shapes_of_state_are_named():
    model = net()
    one = torch.optim.AdamW(model.parameters())
    train(model, one, 1)
    with snapshot({"model": model, "optim": one}) as taken:
        with pytest.raises(MismatchError, match="group 0 holds other parameters"):
            taken.load({"model": model, "optim": groups(model, False)})
        with pytest.raises(MismatchError, match=r"extra\s+optim: parameter 2\.weight"):
            taken.load({"model": model, "optim": torch.optim.AdamW(model[:2].parameters())})
        more = torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(2))])
        with pytest.raises(MismatchError, match=r"missing\s+optim: parameter #0\.6"):
            taken.load({"model": model, "optim": more})
        live = torch.optim.AdamW(model.parameters())
        train(model, live, 1)
        live.state[model[0].weight]["exp_avg"] = torch.zeros(2, 2, dtype=torch.bfloat16)
        with pytest.raises(MismatchError, match=r"optim\.state\.0\.weight\.exp_avg"):
            taken.load({"model": model, "optim": live})


@pytest.mark.parametrize(("saved_lr", "live_lr"), [(0.5, torch.tensor(0.25)), (torch.tensor(0.5), 0.25)])
def test_a_float_is_not_turned_into_a_tensor_or_back_unasked(saved_lr, live_lr):
    model = net()
    with snapshot({"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=saved_lr)}) as taken:
        live = torch.optim.AdamW(model.parameters(), lr=live_lr)
        with pytest.raises(MismatchError, match=r"optim: group 0 lr .*(Tensor.*float|float.*Tensor)"):
            taken.load({"model": model, "optim": live})
        assert live.param_groups[0]["lr"] is live_lr


def test_a_learning_rate_in_a_tensor_is_filled_in_place():
    model = net()
    lr = torch.tensor(0.25)
    with snapshot({"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))}) as taken:
        live = torch.optim.AdamW(model.parameters(), lr=lr)
        taken.load({"model": model, "optim": live})
    assert live.param_groups[0]["lr"] is lr
    assert float(lr) == 0.5


def test_state_beside_the_parameters_comes_back_or_is_refused():
    model = net()
    optimizers: list[Any] = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    saved, live = optimizers
    saved.state["rounds"] = {"n": 3, "norm": torch.tensor([2.0])}
    with snapshot({"model": model, "optim": saved}) as taken:
        taken.load({"model": model, "optim": live})
    assert live.state["rounds"]["n"] == 3
    assert live.state["rounds"]["norm"].tolist() == [2.0]
    saved.state[(1, 2)] = {"n": 3}
    with pytest.raises(UsageError, match=r"optim.*\(1, 2\)"), snapshot({"model": model, "optim": saved}):
        pass


def test_the_parameters_of_two_modules_keep_their_names_apart():
    saved, live = [net(0), net(1)], [net(2), net(3)]
    make = [torch.optim.AdamW([p for m in models for p in m.parameters()]) for models in (saved, live)]
    train(saved[0], make[0], 1)
    with snapshot({"a": saved[0], "b": saved[1], "optim": make[0]}) as taken:
        taken.load({"a": live[0], "b": live[1], "optim": make[1]})
        assert {t.key for t in taken.meta().tensors} >= {
            "optim.state.a.0.weight.exp_avg",
            "optim.state.b.0.bias.step",
        } or ({t.key for t in taken.meta().tensors} >= {"optim.state.a.0.weight.exp_avg"})
    assert len(make[1].state) == len(make[0].state)


# --- schedulers, scaler, generators

SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5, cycle_momentum=False),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.MultiStepLR(o, [2])], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_every_scheduler_goes_on_where_it_was(kind):
    def step(state: dict[str, Any], times: int) -> list[float]:
        seen: list[float] = []
        for turn in range(times):
            train(state["model"], state["optim"], 1)
            state["scheduler"].step(*([float(turn)] if kind == "ReduceLROnPlateau" else []))
            seen.append(state["optim"].param_groups[0]["lr"])
        return seen

    def build(seed: int) -> dict[str, Any]:
        model = net(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # SequentialLR and CyclicLR warn of their own ways
            return {"model": model, "optim": optimizer, "scheduler": SCHEDULERS[kind](optimizer)}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        saved, live = build(0), build(1)
        step(saved, 4)
        with snapshot(saved) as taken:
            taken.load(live)
        assert step(saved, 5) == step(live, 5)
    assert same_module(saved["model"], live["model"])


def test_a_gradient_scaler_and_a_generator_are_state():
    saved, live = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (4.0, 8.0))
    saved.scale(torch.ones(1))
    with snapshot({"scaler": saved}) as taken:
        taken.load({"scaler": live})
    assert live.get_scale() == 4.0


def draws() -> list[Any]:
    normal = numpy.random.normal(size=3).tolist()
    return [random.random(), random.gauss(0, 1), normal, torch.rand(3).tolist(), torch.randn(2).tolist()]


def test_all_generators_go_on_exactly():
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    random.gauss(0, 1)  # leaves a second value behind, as numpy's does
    numpy.random.normal()
    torch.randn(3)
    with snapshot({"d": {}}, rng=True) as taken:
        first = draws()
        draws()
        taken.load({"d": {}}, rng=True)
        assert draws() == first


def test_a_new_rank_gets_generators_of_its_own_the_same_at_every_resume():
    random.seed(1)
    torch.manual_seed(1)
    numpy.random.seed(1)
    with snapshot({"d": {}}, rng=True) as taken:
        seen: list[list[Any]] = []
        for _ in range(2):
            seen.append([])
            for rank in range(3):
                taken.load({"d": {}}, rank=rank, world_size=3, rng=True)
                seen[-1].append(draws())
    assert seen[0] == seen[1]
    assert len({str(one) for one in seen[0]}) == 3


# --- dicts and other stateful things


def test_a_dict_stays_the_same_object_and_so_does_what_it_holds():
    shadow = {"w": torch.zeros(3), "n": 0}
    live: dict[str, Any] = {"step": 0, "gone": 1, "t": torch.zeros(2), "p": nn.Parameter(torch.zeros(2)),
                            "ema": shadow, "list": [torch.zeros(1), {"k": 0}], "grown": []}  # fmt: skip
    tensor, parameter, weight, listed = live["t"], live["p"], shadow["w"], live["list"]
    item, inner = listed
    saved = {
        "step": 5, "t": torch.ones(2), "p": torch.ones(2), "ema": {"w": torch.ones(3), "n": 2, "new": (1,)},
        "list": [torch.ones(1), {"k": 7}], "grown": [{"k": 1}, {"k": 2}], "none": None,
    }  # fmt: skip
    with snapshot({"d": saved}) as taken:
        taken.load({"d": live})
    assert live["step"] == 5
    assert "gone" not in live
    assert live["t"] is tensor
    assert live["p"] is parameter
    assert live["ema"] is shadow
    assert shadow["w"] is weight
    assert live["list"] is listed
    assert listed[0] is item
    assert listed[1] is inner
    assert [t.tolist() for t in (tensor, parameter, weight, item)] == [[1, 1], [1, 1], [1, 1, 1], [1]]
    assert (shadow["n"], shadow["new"], inner, live["grown"], live["none"]) == (
        2, (1,), {"k": 7}, [{"k": 1}, {"k": 2}], None,
    )  # fmt: skip
    assert list(live) == list(saved) or set(live) == set(saved)


def test_keys_that_look_alike_stay_apart():
    saved: dict[Any, Any] = {
        "a.b": torch.tensor([1.0]),
        "a": {"b": torch.tensor([2.0])},
        1: torch.tensor([3.0]),
        "1": torch.tensor([4.0]),
    }
    lives: list[dict[Any, Any]] = [{}, copy.deepcopy(saved), {"a": {"b": torch.zeros(1)}}]
    for live in lives:
        with snapshot({"d": saved}) as taken:
            taken.load({"d": live})
        assert (live["a.b"].item(), live["a"]["b"].item(), live[1].item(), live["1"].item()) == (1, 2, 3, 4)


def test_one_tensor_under_two_keys_is_stored_once():
    shared = torch.arange(1000.0)
    live: dict[str, Any] = {}
    with snapshot({"d": {"a": shared, "b": [shared]}}) as taken:
        assert len(taken.meta().tensors) == 1
        taken.load({"d": live})
    assert live["a"] is live["b"][0]
    assert live["a"].tolist() == shared.tolist()


def test_expanded_targets_are_replaced_and_not_written_through():
    live: dict[str, Any] = {"x": torch.zeros(1).expand(3)}
    with snapshot({"d": {"x": torch.tensor([1.0, 2.0, 3.0])}}) as taken:
        taken.load({"d": live})
    assert live["x"].tolist() == [1.0, 2.0, 3.0]


class Counter:
    """Stateful, by its own rules."""

    def __init__(self) -> None:
        self.value: Any = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "history": [torch.tensor([self.value])]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]
        assert state_dict["history"][0].tolist() == [self.value]


def test_a_stateful_object_is_loaded_and_not_replaced():
    saved, live = Counter(), Counter()
    saved.value = 3
    holder = {"counters": {"c": live}}
    with snapshot({"counters": {"c": saved}}) as taken:
        taken.load(holder)
        live.value += 2
    assert holder["counters"]["c"] is live
    assert live.value == 5


def test_the_snapshot_does_not_change_with_the_state():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, 2)
    loop: dict[str, Any] = {"t": torch.ones(3), "n": [1]}
    state = {"model": model, "optim": optimizer, "loop": loop}
    before = untouched(state)
    with snapshot(state) as taken:
        train(model, optimizer, 2)
        loop["t"].fill_(2)
        loop["n"].append(2)
        assert untouched(state) != before
        taken.load(state)
        assert untouched(state) == before


def test_plain_state_is_each_ranks_own_and_goes_round_in_a_larger_world():
    states = [{"d": {"w": torch.full((4,), float(rank)), "n": rank}} for rank in range(2)]
    with snapshot(*states) as taken:
        for world_size in (1, 2, 3):
            for rank in range(world_size):
                live: dict[str, Any] = {"w": torch.zeros(4)}
                taken.load({"d": live}, rank, world_size)
                assert (live["w"].tolist(), live["n"]) == ([rank % 2] * 4, rank % 2)


def test_another_kind_of_optimizer_is_refused_and_left_alone():
    model = torch.nn.Linear(3, 2)
    saved = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    saved.step()
    other = torch.optim.SGD(model.parameters(), lr=0.5)
    words = "saved AdamW, here SGD"
    with snapshot({"model": model, "optim": saved}) as kept, pytest.raises(MismatchError, match=words):
        kept.load({"model": model, "optim": other})
    assert other.param_groups[0]["lr"] == 0.5 and not other.state
