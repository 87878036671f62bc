"""Which models get a probe, and what the answers mean for an ensemble and for the models that it runs."""

from __future__ import annotations

from gmmvit_deploy.serving.probes import Answer, Probe
from gmmvit_deploy.serving.watch import KnownModel, _Group, groups_of

OK, LATE = Answer(result="answered"), Answer(result="late", detail="no answer")
DEAD = Answer(result="refused", detail="Stub process is not healthy")


def known(model: str, *parts: str) -> KnownModel:
    return KnownModel(probe=Probe(model=model, body=b"", json_bytes=0, parts=parts), timeout_s=2.0)


PARTS = ("preprocess", "network")
MODELS = (known("ensemble", *PARTS), known("preprocess"), known("network"))


class Server:
    """Answers to the probes of each second, beside clients.  computing: the models that use the processor."""

    def __init__(self, **answers: Answer) -> None:
        self.group = _Group(MODELS, {"ensemble": 7, "preprocess": 7, "network": 9})
        self.counts = {"ensemble": 7, "preprocess": 7, "network": 9}
        self.answers = {"ensemble": OK, "preprocess": OK, "network": OK, **answers}
        self.probed: list[tuple[str, ...]] = []

    def second(self, *, clients: tuple[str, ...] = (), computing: tuple[str, ...] = ()) -> str:
        """Return the reason why a model is dead after another second.  clients: models that complete requests."""
        models = [target.probe.model for target in self.group.targets()]
        self.probed.append(tuple(models))
        for model in models:
            # A probe of the ensemble reaches its models in sequence, up to the first that does not answer.
            for reached in (*PARTS, "ensemble") if model == "ensemble" else (model,):
                if self.answers[reached].result != "answered":
                    break
                self.counts[reached] += 1
        for model in clients:
            self.counts[model] += 50
        answers = [self.answers[model] for model in models]
        self.group.observe(answers, dict(self.counts), set(computing), now_s=float(len(self.probed)))
        return self.group.reason


def test_a_model_that_an_ensemble_runs_gets_its_probes_through_the_ensemble() -> None:
    other = known("other")
    assert groups_of([*MODELS, other]) == [MODELS, (other,)]
    assert groups_of(MODELS[1:]) == [MODELS[1:2], MODELS[2:]]
    server = Server()
    assert [server.second() for _ in range(3)] == [""] * 3
    assert server.probed == [("ensemble",)] * 3


def test_a_dead_model_is_named_while_another_model_is_busy() -> None:
    server = Server(ensemble=DEAD, preprocess=DEAD)
    reasons = [server.second(clients=("network",)) for _ in range(3)]
    assert reasons[:2] == ["", ""]
    assert reasons[2].startswith("preprocess failed 2 probes")
    assert server.probed == [("ensemble",), ("ensemble", *PARTS), ("ensemble", *PARTS)]


def test_a_probe_that_only_passed_the_preprocessing_excuses_no_dead_network() -> None:
    server = Server(ensemble=LATE, network=LATE)
    assert server.second() == ""
    assert "failed 2 probes" in server.second()


def test_a_broken_ensemble_is_dead_although_its_models_answer() -> None:
    server = Server(ensemble=DEAD)
    assert server.second() == ""
    assert server.second().startswith("ensemble failed 2 probes")


def test_load_on_a_model_excuses_late_probes_of_its_ensemble() -> None:
    server = Server(ensemble=LATE, network=LATE)
    assert {server.second(clients=("network",)) for _ in range(20)} == {""}
    assert {server.second(computing=("network",)) for _ in range(20)} == {""}


def test_metrics_that_did_not_answer_are_compared_later() -> None:
    server = Server(ensemble=LATE, network=LATE)
    server.group.observe([LATE], None, set(), now_s=0.0)
    assert server.second(clients=("network",)) == ""
    assert server.second(clients=("network",)) == ""


def test_an_answer_of_the_ensemble_ends_all_failures() -> None:
    server = Server(ensemble=DEAD, preprocess=DEAD)
    server.second(clients=("network",))
    server.second(clients=("network",))
    server.answers = dict.fromkeys(server.answers, OK)
    assert server.second() == ""
    server.answers = {"ensemble": DEAD, "preprocess": DEAD, "network": OK}
    assert [server.second(clients=("network",)) for _ in range(2)] == ["", ""]
    assert server.probed[3] == ("ensemble",)
