"""What is documented, drawn and alerted on is what an agent really says; promtool judges the rest."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent.errors import Reason
from tests.support import bundles
from tests.support.agents import ROOT, serving

DOCS = ROOT / "docs"
ALERTS = DOCS / "alerts.yml"
NAME = r"tightfit_[a-z_]+"
# What Prometheus adds, and what it takes away or makes of a histogram.
ADDED = {"job", "instance"}
PROMTOOL = shutil.which("promtool", path=os.pathsep.join((str(ROOT / ".cache" / "bin"), os.environ.get("PATH", ""))))
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not here: it is in the Debian package prometheus, which scripts/test unpacks"
)

Scrape = Mapping[str, set[str]]


@pytest.fixture(scope="module")
def scrape(tmp_path_factory: pytest.TempPathFactory) -> Scrape:
    """Names of samples, and the labels that they have, as an agent shows them that has answered and refused."""
    folder = tmp_path_factory.mktemp("observed")
    (folder / "agent.toml").write_text(
        f'[[models]]\nbundle = "{bundles.add(folder / "add.tfb")}"\ncache_mib = 1\nresults_mib = 1\n'
        '[tracing]\nendpoint = "http://127.0.0.1:9/v1/traces"\nratio = 0\n'
        # No broker has to be there for what is counted.
        f'[mqtt]\nbrokers = ["mqtt://127.0.0.1:1"]\nspool = "{folder / "spool"}"\nfree_floor_mib = 0\n',
        encoding="utf-8",
    )
    with serving(None, folder / "log", "--config", str(folder / "agent.toml")) as agent:
        body = {"inputs": [{"name": n, "shape": [1, 8], "datatype": "FP32", "data": [1] * 8} for n in "ab"]}
        assert agent.post(body)[0] == 200
        assert agent.post(b"{")[0] == 400
        families = list(text_string_to_metric_families(agent.request("/metrics")[1].decode()))
    shown: dict[str, set[str]] = {}
    for family in families:
        shown[family.name + ("_total" if family.type == "counter" else "")] = set()
        for sample in family.samples:
            shown.setdefault(sample.name, set()).update(sample.labels)
        if family.type == "histogram":
            shown[family.name] = {label for sample in family.samples for label in sample.labels} - {"le"}
    # Nothing was degraded or cut, so these have no samples yet.
    shown["tightfit_degradations_total"] = {"cause", "to"}
    shown["tightfit_connections_cut_total"] = {"reason"}
    shown["tightfit_mqtt_dropped_total"] = {"class", "reason"}
    for name in ("tightfit_stood_in_total", "tightfit_streams"):
        shown[name] = {"model"}
    return shown


def names_of(shown: Scrape) -> set[str]:
    """Of metrics, not of a histogram's samples."""
    return {name for name in shown if not re.search(r"_(bucket|count|sum)$", name)}


def dashboard() -> dict[str, Any]:
    board: dict[str, Any] = json.loads((DOCS / "grafana" / "tightfit.json").read_text(encoding="utf-8"))
    return board


def drawn() -> list[tuple[str, str]]:
    """(where it stands, expression) of all that the dashboard asks for."""
    board = dashboard()
    panels = [(each["title"], target["expr"]) for each in board["panels"] for target in each.get("targets", [])]
    return panels + [(each["name"], each["expr"]) for each in board["annotations"]["list"]]


def alerted() -> list[tuple[str, str]]:
    """The same of the alert rules."""
    text = ALERTS.read_text(encoding="utf-8")
    return re.findall(r"- alert: (\w+)\n +expr: (?:>-\n)?(.*?)\n +(?:for|labels):", text, re.DOTALL)


def asked() -> list[tuple[str, str]]:
    return [
        *drawn(),
        *alerted(),
        *((each, each) for each in re.findall(r"```promql\n(.*?)```", documented(), re.DOTALL)),
    ]


def documented() -> str:
    return (DOCS / "observability.md").read_text(encoding="utf-8")


def test_every_metric_is_explained_and_no_other(scrape: Scrape) -> None:
    rows = re.findall(rf"^\| `({NAME})` \|([^|]*)\| .+ \|$", documented(), re.MULTILINE)
    assert {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows} == {
        name: scrape[name] for name in names_of(scrape)
    }


@pytest.mark.parametrize(("where", "expression"), asked(), ids=[where.split("\n")[0] for where, _ in asked()])
def test_what_is_asked_for_is_there(scrape: Scrape, where: str, expression: str) -> None:
    plain = re.sub(r'"[^"]*"', '""', expression)
    names = set(re.findall(rf"{NAME}", expression))
    assert names or "up{" in expression
    assert names <= scrape.keys()
    known = set().union(*(scrape[name] for name in names)) | ADDED | {"__name__", "le"}
    labels = [label for group in re.findall(r"\{([^}]*)\}", plain) for label in re.findall(r"(\w+) *[=!]", group)]
    labels += [label.strip() for group in re.findall(r"by \(([^)]*)\)", plain) for label in group.split(",")]
    assert set(labels) <= known
    for reasons in re.findall(r'reason!?=~?"([^"]*)"', expression):
        assert set(reasons.split("|")) <= {reason.value for reason in Reason}


def test_the_dashboard_is_whole() -> None:
    board = dashboard()
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert all(panel["description"] and panel["fieldConfig"]["defaults"] is not None for panel in panels)
    places = [panel["gridPos"] for panel in board["panels"]]
    covered = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(set(covered)) == len(covered), "panels overlap"
    assert max(x for x, _ in covered) < 24
    variables = {variable["name"] for variable in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(board["panels"])))
    assert used - {"__rate_interval"} == variables


def test_every_alert_is_explained() -> None:
    assert re.findall(r"^\| `(Tightfit\w+)` \|", documented(), re.MULTILINE) == [name for name, _ in alerted()]


def promtool(*arguments: str) -> str:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_promtool_takes_the_rules() -> None:
    assert f"{len(alerted())} rules found" in promtool("check", "rules", str(ALERTS))


@needs_promtool
def test_promtool_takes_what_the_dashboard_asks_for(tmp_path: Path) -> None:
    expressions = [expression.replace("$__rate_interval", "1m") for _, expression in drawn()]
    rules = [{"record": f"x:{at}", "expr": each} for at, each in enumerate(expressions)]
    # JSON is YAML.
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "x", "rules": rules}]}), encoding="utf-8")
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(tmp_path / "rules.yml"))


# Series, each with its value at every minute; how many minutes later; and whether it fires then.
CASES: dict[str, tuple[dict[str, str], int, bool]] = {
    "TightfitAgentAbsent": ({'up{job="tightfit"}': "1 1 0 0 0 0"}, 5, True),
    "TightfitAgentAbsent, back again": ({'up{job="tightfit"}': "1 1 0 1 0 1"}, 5, False),
    "TightfitNoAgents": ({'up{job="other"}': "1x20"}, 10, True),
    "TightfitNoAgents, one": ({'up{job="tightfit"}': "0x20"}, 10, False),
    "TightfitAgentRestarts": ({"tightfit_uptime_seconds": "9 9 8 9 7 9 6 9"}, 7, True),
    "TightfitAgentRestarts, once": ({"tightfit_uptime_seconds": "9 9 8 9 10 11 12"}, 6, False),
    "TightfitEngineDown": ({'tightfit_engine_up{model="m"}': "1 0 0 0"}, 3, True),
    "TightfitEngineDown, back again": ({'tightfit_engine_up{model="m"}': "1 0 1 1"}, 3, False),
    "TightfitEngineRestarts": ({'tightfit_engine_restarts_total{model="m"}': "0 0 1 1 1"}, 4, True),
    "TightfitEngineRestarts, long ago": ({'tightfit_engine_restarts_total{model="m"}': "0 1 1+0x40"}, 40, False),
    "TightfitRequestsFail": ({'tightfit_requests_total{model="m", reason="engine_error"}': "0 0 1 1"}, 3, True),
    "TightfitRequestsFail, the client's": (
        {'tightfit_requests_total{model="m", reason="bad_request"}': "0+9x9"}, 9, False),
    "TightfitDeadlinesMissed": (
        {'tightfit_requests_total{model="m", reason="ok"}': "0+97x20",
         'tightfit_requests_total{model="m", reason="deadline"}': "0+3x20"}, 15, True),
    "TightfitDeadlinesMissed, few": (
        {'tightfit_requests_total{model="m", reason="ok"}': "0+997x20",
         'tightfit_requests_total{model="m", reason="deadline"}': "0+3x20"}, 15, False),
    "TightfitDeadlinesMissed, idle": (
        {'tightfit_requests_total{model="m", reason="ok"}': "5x20",
         'tightfit_requests_total{model="m", reason="deadline"}': "5x20"}, 15, False),
    "TightfitQueueFull": ({'tightfit_requests_total{model="m", reason="queue_full"}': "0+1x10"}, 8, True),
    "TightfitQueueFull, of one client": (
        {'tightfit_requests_total{model="m", reason="client_queue_full"}': "0+1x10"}, 8, True),
    "TightfitQueueFull, for a moment": (
        {'tightfit_requests_total{model="m", reason="queue_full"}': "0 0 9 9+0x20"}, 20, False),
    "TightfitQueueFills": (
        {'tightfit_door_depth{model="m"}': "0 50x9", 'tightfit_door_room{model="m"}': "64x9"}, 5, True),
    "TightfitQueueFills, half": (
        {'tightfit_door_depth{model="m"}': "0 32x9", 'tightfit_door_room{model="m"}': "64x9"}, 5, False),
    "TightfitDegraded": ({"tightfit_degradation_level": "0 2x9"}, 9, True),
    "TightfitDegraded, briefly": ({"tightfit_degradation_level": "0 2 2 0x9"}, 9, False),
    "TightfitCertificateExpires": ({"tightfit_certificate_expires_seconds": "600000x9"}, 9, True),
    "TightfitCertificateExpires, in a month": ({"tightfit_certificate_expires_seconds": "2600000x9"}, 9, False),
    "TightfitCertificateExpires, without TLS": ({"tightfit_certificate_expires_seconds": "0x9"}, 9, False),
    "TightfitMemoryOverPlan": (
        {'tightfit_memory_bytes{process="gateway", model=""}': "60x9",
         'tightfit_memory_bytes{process="engine", model="m"}': "60x9",
         'tightfit_plan_bytes{model="m", term="weights"}': "90x9", 'tightfit_cache_bytes{model="m"}': "20x9"}, 9, True),
    "TightfitMemoryOverPlan, of what is kept": (
        {'tightfit_memory_bytes{process="engine", model="m"}': "120x9",
         'tightfit_plan_bytes{model="m", term="weights"}': "90x9", 'tightfit_cache_bytes{model="m"}': "40x9"},
        9, False),
    "TightfitMemoryOverBudget": (
        {'tightfit_memory_bytes{process="engine", model="m"}': "120x9", "tightfit_budget_bytes": "100x9"}, 9, True),
    "TightfitMemoryOverBudget, below": (
        {'tightfit_memory_bytes{process="engine", model="m"}': "80x9", "tightfit_budget_bytes": "100x9"}, 9, False),
}  # fmt: skip


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_not() -> None:
    for fires in (True, False):
        assert {each.partition(",")[0] for each, (*_, expected) in CASES.items() if expected is fires} == {
            name for name, _ in alerted()
        }


@needs_promtool
def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    tests = []
    for case, (series, minutes, fires) in CASES.items():
        alert = case.partition(",")[0]
        expression = f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})'
        tests.append(
            {
                "name": case,
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": [
                    {
                        "expr": expression,
                        "eval_time": f"{minutes}m",
                        "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
                    }
                ],
            }
        )
    file = tmp_path / "tests.yml"
    file.write_text(json.dumps({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}), "utf-8")
    promtool("test", "rules", str(file))
