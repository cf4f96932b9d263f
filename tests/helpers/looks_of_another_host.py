"""What one host sees of leases, holds and dates that another has just written; argv: URL."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime, timedelta

from ckptcore.catalog import claims, conversions, holds, open_catalog, queues
from ckptcore.catalog.database import clock
from ckptcore.custody.place_ties import writer_of_place
from ckptcore.operations.retention.purge import purge
from ckptcore.planning.request import Settings

url, ahead = sys.argv[1], datetime.now(UTC)
with open_catalog(url) as catalog:
    with catalog.writing() as conn:
        key = claims.Key("manifest", "/out", "options")
        taken = claims.take(conn, clock(conn), key, "/source", "another", retry=True)
        print(
            json.dumps(
                {
                    "clock": round((ahead - clock(conn)) / timedelta(minutes=1)),
                    "claim": taken.mine,
                    "ended": len(conversions.interrupted(conn)),
                    "silent": sum(bool(row.silent) for row in conversions._recorded(conn)),
                    "writes": bool(writer_of_place(conn, "/out")),
                    "holds": len(holds.active(conn, clock(conn))),
                    "events": len(queues.inbox.take(conn, clock(conn), limit=9, lease=timedelta(minutes=1))),
                }
            )
        )
    purged = purge(catalog, Settings(workers=1), None, due=catalog.now())
    print(json.dumps([each.fate for each in purged]))
