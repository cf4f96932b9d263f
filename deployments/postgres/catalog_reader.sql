-- A role that reads the catalog and can change nothing: for dashboards, notebooks and `ckptcore catalog sql`.
-- An administrator runs it once, in the catalog's database:
--
--   psql -d ckptcore -v reader=catalog_reader -v owner=ckptcore -v database=ckptcore -f catalog_reader.sql
--   psql -d ckptcore -c "ALTER ROLE catalog_reader PASSWORD '...'"
--
-- Bodies of events and messages are left out: senders write them, and they may hold what only the receiver may see.
\set ON_ERROR_STOP on
CREATE ROLE :"reader" LOGIN CONNECTION LIMIT 5 NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION;
ALTER ROLE :"reader" SET default_transaction_read_only = on;
ALTER ROLE :"reader" SET statement_timeout = '60s';
ALTER ROLE :"reader" SET temp_file_limit = '1GB';
REVOKE CREATE ON SCHEMA public FROM PUBLIC;
REVOKE TEMPORARY ON DATABASE :"database" FROM PUBLIC;
GRANT CONNECT ON DATABASE :"database" TO :"reader";
GRANT USAGE ON SCHEMA public TO :"reader";
GRANT SELECT ON ALL TABLES IN SCHEMA public TO :"reader";
REVOKE SELECT ON inbox, outbox FROM :"reader";
GRANT SELECT (id, uuid, source, event_id, type, uri, run, step, state, attempts, due_at, received_at, ended_at,
  flow_run_id, error_message, attempts_before) ON inbox TO :"reader";
GRANT SELECT (id, uuid, endpoint, key, type, state, attempts, due_at, created_at, ended_at, error_message,
  attempts_before) ON outbox TO :"reader";
-- Tables and views of later versions of ckptcore.
ALTER DEFAULT PRIVILEGES FOR ROLE :"owner" IN SCHEMA public GRANT SELECT ON TABLES TO :"reader";
-- Locks would make the catalog's writers wait.
REVOKE EXECUTE ON FUNCTION pg_advisory_lock(bigint), pg_advisory_lock(int, int), pg_advisory_lock_shared(bigint),
  pg_advisory_lock_shared(int, int), pg_try_advisory_lock(bigint), pg_try_advisory_lock(int, int),
  pg_try_advisory_lock_shared(bigint), pg_try_advisory_lock_shared(int, int), pg_advisory_xact_lock(bigint),
  pg_advisory_xact_lock(int, int), pg_advisory_xact_lock_shared(bigint), pg_advisory_xact_lock_shared(int, int),
  pg_try_advisory_xact_lock(bigint), pg_try_advisory_xact_lock(int, int),
  pg_try_advisory_xact_lock_shared(bigint), pg_try_advisory_xact_lock_shared(int, int) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION pg_advisory_xact_lock(bigint) TO :"owner";
-- Functions of extensions that open connections or files of their own: a read-only transaction does not hold for these.
-- Run this again after an extension is added. What remains: an extension of another name with such a function, and
-- whatever its administrator grants to PUBLIC.
DO $$
DECLARE outside regprocedure;
BEGIN
  FOR outside IN
    SELECT pg_proc.oid FROM pg_proc
    JOIN pg_depend ON pg_depend.classid = 'pg_proc'::regclass AND pg_depend.objid = pg_proc.oid AND deptype = 'e'
    JOIN pg_extension ON pg_depend.refclassid = 'pg_extension'::regclass AND pg_extension.oid = refobjid
    WHERE extname IN ('adminpack', 'dblink', 'file_fdw', 'lo', 'postgres_fdw')
  LOOP
    EXECUTE 'REVOKE EXECUTE ON FUNCTION ' || outside || ' FROM PUBLIC';
  END LOOP;
END $$;
