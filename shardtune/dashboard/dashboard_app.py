"""The dashboard's routes. All are GET: nothing can be changed from a browser."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from shardtune.core.files.regular_file import read_regular
from shardtune.core.record import Record
from shardtune.dashboard.live_stream import live_events
from shardtune.dashboard.metric_columns import MetricCurves
from shardtune.dashboard.open_run import OpenRuns
from shardtune.dashboard.plan_form import PlanRequest, make_plan_answer, plan_options
from shardtune.dashboard.rank_output import RankLog, RankStack, log_page, rank_logs, rank_stacks
from shardtune.dashboard.run_details import RunComparison, RunDetails, compare_runs, run_details
from shardtune.dashboard.run_folder import FoundRun, RunFolder, printable
from shardtune.dashboard.run_row import RunRow, RunSummaries, RunSummary
from shardtune.dashboard.run_search import matches
from shardtune.dashboard.static_files import static_files, static_reply
from shardtune.errors import ShardtuneError
from shardtune.report.run_page import PAGE_FILE
from shardtune.web.http_guard import AccessRules, Guard
from shardtune.web.page_headers import page_headers
from shardtune.web.replies import STREAM_HEADERS, ApiError, no_such_path, with_refusals

_CURVE_POINTS = 4000  # of one curve
MOST_COMPARED = 12  # runs
_PAGE_BYTES = 1 << 22
MOST_STREAMS = 64  # pages that are followed at once

_aside = asyncio.to_thread  # files are read, and plans are made, while others are answered


class RunList(Record):
    """The list of runs, as it is searched."""

    folder: str
    """Its own name."""
    runs: tuple[RunRow, ...]
    all: int
    """Runs in the folder, found by the search or not."""
    notes: tuple[str, ...]
    """What was passed over, and why."""


class RankOutput(Record):
    """What there is of the ranks' own output."""

    logs: tuple[RankLog, ...]
    stacks: tuple[RankStack, ...]


class Dashboard:
    """A page over the runs in one folder."""

    def __init__(self, root: Path, access: AccessRules) -> None:
        self._folder, self._summaries, self._open = RunFolder(root), RunSummaries(), OpenRuns()
        self._streams, self._stopping = 0, False
        routes = {
            "/api/runs": self._list,
            "/api/runs/{id}": self._details,
            "/api/runs/{id}/curves": self._curves,
            "/api/runs/{id}/live": self._live,
            "/api/runs/{id}/output": self._output,
            "/api/runs/{id}/report": self._report,
            "/api/runs/{id}/log": self._log,
            "/api/compare": self._compare,
            "/api/plan": self._plan,
            "/api/plan/options": self._plan_options,
        }
        self.app = Starlette(
            routes=[
                *(Route(path, self._static) for path in static_files()),
                *(Route(path, with_refusals(handler)) for path, handler in routes.items()),
            ],
            middleware=[Middleware(Guard, access=access, open_paths=tuple(static_files()))],
            exception_handlers={404: no_such_path, 405: no_such_path},
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Looks at all runs before anybody asks: a first list is then as fast as the next."""
        first = asyncio.create_task(
            _aside(lambda: self._summaries.all(self._folder.runs().runs.values()))
        )
        yield
        await first

    def _look(self) -> tuple[list[RunSummary], tuple[str, ...]]:
        """All runs, and what was passed over."""
        found = self._folder.runs()
        return self._summaries.all(found.runs.values()), found.notes

    def stop(self) -> None:
        """Ends the streams: the server is about to end."""
        self._stopping = True

    async def _static(self, request: Request) -> Response:
        return static_reply(request.scope["path"])

    async def _list(self, request: Request) -> Response:
        query = request.query_params.get("q", "")[:500]

        def find() -> RunList:
            summaries, notes = self._look()
            rows = [each.row for each in summaries if matches(query, each.searched())]
            rows.sort(key=lambda row: (row.state != "running", -row.written))
            return RunList(
                folder=printable(Path(self._folder.root.name)), runs=tuple(rows),
                all=len(summaries), notes=notes,
            )  # fmt: skip

        return _reply(await _aside(find), request)

    async def _details(self, request: Request) -> Response:
        run = await self._run(request)

        def find() -> RunDetails:
            return run_details(self._summaries.of(run))

        return _reply(await _aside(find), request)

    async def _curves(self, request: Request) -> Response:
        run = await self._run(request)
        begin, end, most = (_count(request, key) for key in ("from", "to", "points"))

        def find() -> MetricCurves:
            points = min(most or 800, _CURVE_POINTS)
            return self._open.open(run.path).look(lambda held: held.curves(points, begin, end))

        return _reply(await _aside(find), request)

    async def _live(self, request: Request) -> Response:
        run = await self._run(request)
        if self._streams >= MOST_STREAMS:
            raise ApiError(429, f"{MOST_STREAMS} pages are followed already", "too_many_streams")

        def summary() -> RunSummary | None:
            found = self._folder.find(run.id)
            return None if found is None else self._summaries.of(found)

        async def counted() -> AsyncIterator[bytes]:
            self._streams += 1
            try:
                events = live_events(self._open.open(run.path), summary, lambda: self._stopping)
                async for event in events:
                    yield event
            finally:
                self._streams -= 1

        return StreamingResponse(counted(), 200, STREAM_HEADERS, "text/event-stream")

    async def _report(self, request: Request) -> Response:
        """The run's own page. It may be anybody's file: in the sandbox it can reach nothing."""
        run = await self._run(request)
        try:
            page = await _aside(read_regular, run.path / PAGE_FILE, _PAGE_BYTES, follow_links=False)
        except OSError:
            raise ApiError(404, "the run has left no page yet", "no_page") from None
        headers = page_headers("'unsafe-inline'", "'unsafe-inline'")
        headers["Content-Security-Policy"] += "; sandbox allow-scripts"
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)

    async def _output(self, request: Request) -> Response:
        run = await self._run(request)

        def find() -> RankOutput:
            return RankOutput(logs=rank_logs(run.path), stacks=rank_stacks(run.path))

        return _reply(await _aside(find), request)

    async def _log(self, request: Request) -> Response:
        run = await self._run(request)
        attempt, rank = _count(request, "attempt") or 0, _count(request, "rank") or 0
        before = _count(request, "before")
        try:
            return _reply(await _aside(log_page, run.path, attempt, rank, before), request)
        except OSError:
            fact = f"attempt {attempt} has no log of rank {rank}"
            raise ApiError(404, fact, "no_log") from None

    async def _compare(self, request: Request) -> Response:
        ids = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 2 <= len(ids) <= MOST_COMPARED:
            raise ApiError(400, f"compare 2 to {MOST_COMPARED} runs", None, "run")
        runs = [await _aside(self._there, id) for id in ids]

        def find() -> RunComparison:
            summaries = [self._summaries.of(run) for run in runs]
            points = max(100, _CURVE_POINTS // (2 * len(runs)))
            curves = [
                self._open.open(run.path).look(lambda held: held.curves(points, only="loss"))
                for run in runs
            ]
            return compare_runs(summaries, curves)

        return _reply(await _aside(find), request)

    async def _plan_options(self, request: Request) -> Response:
        return _reply(await _aside(plan_options), request)

    async def _plan(self, request: Request) -> Response:
        try:
            asked = PlanRequest.model_validate_strings(dict(request.query_params))
            return _reply(await _aside(make_plan_answer, asked), request)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise ApiError(400, f"{place}: {first['msg']}", None, place) from None
        except ShardtuneError as error:
            told = "; ".join(str(problem) for problem in error.problems)
            raise ApiError(400, told, "no_plan") from None

    async def _run(self, request: Request) -> FoundRun:
        return await _aside(self._there, request.path_params["id"])

    def _there(self, id: str) -> FoundRun:
        run = self._folder.find(id)
        if run is None:
            raise ApiError(404, "this run is gone, or never was", "no_such_run")
        return run


def _reply(found: Record, request: Request) -> Response:
    """The record as JSON; nothing if the browser has it already."""
    body = found.model_dump_json().encode()
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type="application/json", headers=headers)


def _count(request: Request, key: str) -> int | None:
    """A number of the query; None where it isn't given."""
    text = request.query_params.get(key)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise ApiError(400, f"{key} is {text[:40]!r}; it has to be a whole number", None, key)
    return int(text)
