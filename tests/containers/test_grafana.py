"""The dashboard against the types that Grafana publishes (@grafana/schema), by TypeScript.

Grafana itself has no package that could be had here; this sees to names, values and shapes.
"""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from docker_host import ROOT

PACKAGES = ("@grafana/schema@13.2.3", "typescript@5.9.2")
RAW = "@grafana/schema/dist/esm/raw/composable"
PANELS = {
    "timeseries": "timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen",
    "stat": "stat/panelcfg/x/StatPanelCfg_types.gen",
}
DASHBOARD = json.loads((ROOT / "monitoring/dashboards/lmcache-xpu.json").read_text())

pytestmark = pytest.mark.skipif(shutil.which("npm") is None, reason="no npm here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grafana")
    (folder / "package.json").write_text("{}")
    subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--silent", *PACKAGES],
        cwd=folder,
        check=True,
        timeout=300,
    )
    return folder


def program(dashboard) -> str:
    """A program that is right if, and only if, the dashboard has Grafana's types."""
    lines = ['import type { Dashboard, Panel, RowPanel } from "@grafana/schema";']
    lines += [f'import type * as {kind} from "{RAW}/{where}";' for kind, where in PANELS.items()]
    plain = {key: value for key, value in dashboard.items() if key != "panels"}
    lines.append(f"const dashboard: Strict<Dashboard> = {json.dumps(plain)};")
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            lines.append(f"const row{panel['id']}: Strict<RowPanel> = {json.dumps(panel)};")
            continue
        kind = panel["type"]
        own = dict(panel)
        options = own.pop("options")
        custom = own["fieldConfig"]["defaults"].pop("custom", None)
        number = panel["id"]
        lines.append(f"const panel{number}: Strict<Panel> = {json.dumps(own)};")
        lines.append(f"const options{number}: Strict<{kind}.Options> = {json.dumps(options)};")
        if custom is not None:
            lines.append(f"const c{number}: Strict<{kind}.FieldConfig> = {json.dumps(custom)};")
    # Grafana's types use enums, of which JSON has the values.
    lines.append(
        "type Strict<T> = T extends string ? `${T}` : T extends number ? T | number :"
        " T extends (infer U)[] ? Strict<U>[] :"
        " T extends object ? { [K in keyof T]: Strict<T[K]> } : T;"
    )
    return "\n".join(lines) + "\nexport {};\n"


def complaints(folder, dashboard) -> str:
    (folder / "check.ts").write_text(program(dashboard))
    options = ["--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext"]
    done = subprocess.run(
        ["node_modules/.bin/tsc", *options, "--moduleResolution", "nodenext", "check.ts"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.stdout


def test_the_dashboard_has_grafanas_types(folder):
    assert complaints(folder, DASHBOARD) == ""


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["graphTooltip"], "both"),
        (["panels", 1, "options", "colorMode"], "valu"),
        (["panels", 1, "fieldConfig", "defaults", "unit"], 5),
        (["panels", 1, "gridPos", "width"], 3),
        (["templating", "list", 0, "type"], "data-source"),
    ],
)
def test_a_mistake_would_be_seen(folder, path, value):
    broken = json.loads(json.dumps(DASHBOARD))
    place = broken
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert "error TS" in complaints(folder, broken)
