-- The databases of Prefect and of the catalog, each with an owner who may do nothing else. May be repeated.
\set ON_ERROR_STOP on
\getenv prefect POSTGRES_PREFECT_PASSWORD
\getenv ckptcore POSTGRES_CKPTCORE_PASSWORD
-- The server's log has the text of a failed statement, and so the password.
SET log_min_error_statement = panic;
SELECT format('CREATE ROLE %I LOGIN', name) FROM unnest(ARRAY['prefect', 'ckptcore']) AS name
  WHERE name NOT IN (SELECT rolname FROM pg_roles) \gexec
SELECT format('CREATE DATABASE %I', name) FROM unnest(ARRAY['prefect', 'ckptcore']) AS name
  WHERE name NOT IN (SELECT datname FROM pg_database) \gexec
ALTER ROLE prefect PASSWORD :'prefect';
ALTER ROLE ckptcore PASSWORD :'ckptcore';
ALTER DATABASE prefect OWNER TO prefect;
ALTER DATABASE ckptcore OWNER TO ckptcore;
REVOKE ALL ON DATABASE prefect, ckptcore FROM PUBLIC;
