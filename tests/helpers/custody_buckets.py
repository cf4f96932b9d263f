"""The source, the copy and the other checkpoint of `custody_copies`, in a bucket of `fault_s3`."""

from __future__ import annotations

import os
import signal
from datetime import UTC, datetime

import pytest
from custody_copies import NOW, WEEK, save
from retiring import MEANS

from ckptcore.catalog import open_catalog
from ckptcore.catalog import watched_roots as roots
from ckptcore.conversion.pipeline import convert, inspect
from ckptcore.conversion.registration import facts
from ckptcore.errors import CkptError, DestinationExists
from ckptcore.operations.retention.policy import Policy
from ckptcore.operations.retention.purge import purge
from ckptcore.operations.retention.retire import retire
from ckptcore.planning.request import Request

SOURCE, COPY, OTHER = "s3://b/runs/llama/step-1", "s3://b/out/k", "s3://b/other"
IN_PLACE = {"overwrite": True, "overwrite_in_place": True}


class Bucket:
    """Two watched steps, the copy of the first, and `other`, of other contents."""

    def __init__(self, server, catalog, url, tmp):
        self.server, self.catalog, self.url, self.tmp = server, catalog, url, tmp
        for number, place in enumerate(("runs/llama/step-1", "runs/llama/step-2", "other"), start=1):
            self.put(place, number)
        with catalog.writing() as conn:
            roots.add(conn, datetime.now(UTC), "r", "s3://b/runs")
        newest = "s3://b/runs/llama/step-2"
        catalog.record_validation(facts(inspect(newest), newest), ())
        self.convert(SOURCE, COPY)

    def put(self, place, number, **more):
        for file in save(self.tmp / f"{place}-{number}", number, **more).iterdir():
            self.server.put(f"b/{place}/{file.name}", file.read_bytes())

    def convert(self, source, target, *, catalog=None, **options):
        url = self.url if catalog is None else catalog
        return convert(Request(str(source), str(target), **options), MEANS, None, url)

    def retire(self, grace=NOW, **options):
        return retire(self.catalog, Policy(1), yes=True, grace=grace, **options)

    def due(self):
        return tuple(purge(self.catalog, MEANS, None, due=datetime.now(UTC) + 2 * WEEK))

    def counted_on(self):
        assert self.retire().counts == {"deleted": 1, "kept": 1}
        assert not self.there("runs/llama/step-1/")
        return self

    def there(self, prefix):
        prefix = f"b/{prefix}"
        found = self.server.objects.items()
        return {name: stored.data for name, stored in sorted(found) if name.startswith(prefix)}

    def refuses(self, target=COPY, **options):
        before = self.there(target.removeprefix("s3://b/"))
        assert before
        with pytest.raises(DestinationExists, match="only proven copy") as error:
            self.convert(OTHER, target, **IN_PLACE, **options)
        assert self.there(target.removeprefix("s3://b/")) == before
        return error.value

    def killed(self, last, act):
        """Something in a process of its own, which is killed after its n-th change; False if it ended."""
        child = os.fork()
        if not child:
            try:
                with open_catalog(self.url) as catalog:
                    act(catalog)
                os._exit(0)
            except CkptError:
                os._exit(3)
            finally:
                os._exit(4)
        left = [last]

        def strike(_path):
            left[0] -= 1
            if left[0] == 0:
                os.kill(child, signal.SIGKILL)

        self.server.after = strike
        status = os.waitpid(child, 0)[1]
        self.server.after = None
        assert status in (0, signal.SIGKILL), status
        return status == signal.SIGKILL
