"""Create or update the work pool, the deployments and the automations on a Prefect server.

``python -m deployments.deploy`` can be repeated at any time. Compose, Kubernetes and `make up` run it.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import yaml

import flows  # noqa: F401  # sets Prefect's environment first
from ckptcore.errors import CkptError, UsageError
from ckptcore.redaction import bare_url, ending
from ckptcore.utils import terminal
from deployments import POOL, with_project
from deployments.parameters import declared, flow_of, misfits
from flows._prefect import end_with, unanswered

FILES = Path(__file__).parent


def deploy(wait: float = 120.0) -> None:
    """Create or update everything in prefect.yaml and automations.yaml on the configured server.

    Args:
        wait: seconds to wait for the server.

    Raises:
        UsageError: the files do not match the flows, the server does not answer, or Prefect reports an error.
    """
    _require_flows_fit()
    _await_server(wait)
    _make_pool()
    # The working directory does not matter: entrypoints are modules.
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file"]
        outcome = subprocess.run(
            [*command, str(FILES / "prefect.yaml")],
            cwd=folder,
            env=with_project(os.environ),
            capture_output=True,
            text=True,
            check=False,
        )
    # The command reports what it could not deploy, but exits with 0.
    if outcome.returncode or "Error" in outcome.stdout or "error" in outcome.stderr.lower():
        raise UsageError(
            f"prefect deploy failed: {ending(outcome.stdout, 2000)} {ending(outcome.stderr, 2000)}".strip()
        )
    _describe()
    _automate()


def _require_flows_fit() -> None:
    """Raise `UsageError` unless every flow accepts the parameters of its deployment and its triggers."""
    wrong = []
    for deployment in declared():
        by_trigger = {
            name for trigger in deployment.get("triggers") or () for name in trigger.get("parameters") or ()
        }
        # Parameters without a default come with each run.
        needed = {
            n for n, p in inspect.signature(flow_of(deployment).fn).parameters.items() if p.default is p.empty
        }
        misfit_texts = misfits(flow_of(deployment), deployment.get("parameters") or {}, by_trigger | needed)
        wrong += [f"deployment {deployment['name']}: {text}" for text in misfit_texts]
    if wrong:
        raise UsageError(
            "cannot deploy prefect.yaml: " + "; ".join(wrong), hint="correct the file. Nothing was changed"
        )


def _await_server(wait: float) -> None:
    from prefect.settings import get_current_settings

    url = get_current_settings().api.url
    if url is None:
        raise UsageError("no Prefect server is configured", hint="set PREFECT_API_URL")
    until = time.monotonic() + wait
    while True:
        try:
            answer = httpx.get(f"{url}/ready", timeout=5)
            if answer.status_code == 200:
                return
            if answer.status_code in (401, 403, 404):  # waiting changes nothing
                until = 0.0
            reason = f"HTTP {answer.status_code}"
        except httpx.HTTPError as error:
            reason = str(error)
        if time.monotonic() > until:
            raise UsageError(
                f"the Prefect server at {bare_url(url)} is not ready: {reason}", hint="start the server"
            )
        time.sleep(0.5)


def _make_pool() -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists
    from prefect.workers.process import ProcessWorker

    template = ProcessWorker.get_default_base_job_template()
    with get_client(sync_client=True) as client:
        try:
            client.create_work_pool(WorkPoolCreate(name=POOL, type="process", base_job_template=template))
        except ObjectAlreadyExists:
            return  # keep the settings that users have made


def _describe() -> None:
    """Set one line as the description of every deployment; Prefect would show the flow's full docstring."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import DeploymentUpdate

    with get_client(sync_client=True) as client:
        for deployment in declared():
            flow = flow_of(deployment)
            server_deployment = client.read_deployment_by_name(f"{flow.name}/{deployment['name']}")
            update = DeploymentUpdate(description=(flow.fn.__doc__ or "").split("\n")[0])
            client.update_deployment(server_deployment.id, update)


def _automate() -> None:
    from prefect.client.orchestration import get_client
    from prefect.events.schemas.automations import AutomationCore

    with get_client(sync_client=True) as client:
        for form in yaml.safe_load((FILES / "automations.yaml").read_text())["automations"]:
            automation = AutomationCore.model_validate(form)
            same_name = client.read_automations_by_name(automation.name)
            if same_name:
                client.update_automation(same_name[0].id, automation)
            else:
                client.create_automation(automation)


def main() -> None:
    """Run the command line."""
    parser = terminal.parser(prog="python -m deployments.deploy", description=__doc__)
    parser.add_argument("--wait", type=float, default=120.0, help="seconds to wait for the server")
    try:
        deploy(parser.parse_args().wait)
    except CkptError as error:
        end_with(error)
    except Exception as error:  # of Prefect's client
        server_error = unanswered(error)
        if server_error is None:
            raise
        end_with(server_error)


if __name__ == "__main__":
    terminal.guard()
    main()
