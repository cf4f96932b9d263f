# Written by `make up`: the addresses and secrets of the local system.
export CKPTCORE_STATE='{folder}'
export PREFECT_API_URL='{prefect}/api'
export PREFECT_API_AUTH_STRING='admin:{PREFECT_PASSWORD}'
export CKPTCORE_CATALOG_URL='{catalog}'
export CKPTCORE_HOOK_TOKEN='{CKPTCORE_HOOK_TOKEN}'
export CKPTCORE_PAGE_TOKEN='{CKPTCORE_PAGE_TOKEN}'
export CKPTCORE_HOOK_SECRET='{CKPTCORE_HOOK_SECRET}'
export CKPTCORE_HOOK_URL='{receiver}/hooks/trainer'
