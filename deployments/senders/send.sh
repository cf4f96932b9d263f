#!/usr/bin/env bash
# Announce a checkpoint, with bash, openssl and curl:
#
#   CKPTCORE_HOOK_URL=https://hooks.example/hooks/trainer CKPTCORE_HOOK_SECRET=whsec_... send.sh URI [RUN [STEP]]
#
# CKPTCORE_HOOK_META may hold facts about the training, as a JSON object: {"metrics":{"loss":2.31},"user":"ada"}.
# Requests are signed as Standard Webhooks. openssl takes the key as an argument, which other users of the machine
# can see for a moment; with send.py they cannot.
set -euo pipefail
: "${CKPTCORE_HOOK_URL:?the address, as in https://hooks.example/hooks/trainer}"
: "${CKPTCORE_HOOK_SECRET:?the shared secret, whsec_...}"
uri=${1:-} run=${2:-} step=${3:-}
case "$uri" in '' | -*) echo "usage: send.sh URI [RUN [STEP]]" >&2; exit 2 ;; esac
case "$uri$run$step" in *[\"\\[:cntrl:]]*) echo "quotes and control characters cannot be sent" >&2; exit 2 ;; esac
case "$step" in *[!0-9]*) echo "the step is a whole number" >&2; exit 2 ;; esac
while [[ $step == 0?* ]]; do step=${step#0}; done   # JSON has no 0300

meta=${CKPTCORE_HOOK_META:-}
case "$meta" in '' | '{'*'}') ;; *) echo "CKPTCORE_HOOK_META is a JSON object" >&2; exit 2 ;; esac

id=msg_$(openssl rand -hex 16)
body='{"type":"checkpoint.saved","timestamp":"'$(date -u +%FT%TZ)'","data":{"uri":"'$uri'","run":"'$run'","step":'${step:-null}${meta:+,\"meta\":$meta}'}}'
key=$(printf %s "${CKPTCORE_HOOK_SECRET#whsec_}" | openssl base64 -d -A | od -An -vtx1 | tr -d ' \n')

# All tries have the same id, so repeats are recognised. A signature is valid for five minutes: each try has its own.
send() {
  local now signature
  now=$(date +%s)
  signature=$(printf %s "$id.$now.$body" | openssl dgst -sha256 -mac HMAC -macopt "hexkey:$key" -binary | openssl base64 -A)
  printf %s "$body" | curl --silent --show-error --max-time 20 --data-binary @- --write-out '\n%{http_code}' \
    -H "content-type: application/json" -H "webhook-id: $id" -H "webhook-timestamp: $now" \
    -H "webhook-signature: v1,$signature" "$CKPTCORE_HOOK_URL"
}

for wait in 1 2 5 10 20 30 60 60 60 ''; do
  if answer=$(send); then status=${answer##*$'\n'}; else status=none; fi
  case "$status" in
    2*) printf '%s\n' "${answer%$'\n'*}"; exit 0 ;;
    none | 408 | 429 | 5*) [ -z "$wait" ] || sleep "$wait" ;;  # no connection, or lost during the reply
    *) break ;;                                                # a refused request is not repeated
  esac
done
printf '%s\nHTTP status: %s\n' "${answer%$'\n'*}" "$status" >&2
exit 1
