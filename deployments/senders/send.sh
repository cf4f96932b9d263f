#!/usr/bin/env bash
# Announce a checkpoint, with bash, openssl and curl:
#
#   CKPT_HOOK_URL=https://hooks.example/hooks/trainer CKPT_HOOK_SECRET=whsec_... send.sh URI [RUN [STEP]]
#
# Signed as Standard Webhooks are. openssl takes the key as an argument, which other users of the machine can see
# for a moment; send.py has no such moment.
set -euo pipefail
: "${CKPT_HOOK_URL:?the address, as in https://hooks.example/hooks/trainer}"
: "${CKPT_HOOK_SECRET:?the shared secret, whsec_...}"
uri=${1:?usage: send.sh URI [RUN [STEP]]} run=${2:-} step=${3:-}
case "$uri$run$step" in *[\"\\[:cntrl:]]*) echo "quotes and control characters cannot be sent" >&2; exit 2 ;; esac
case "$step" in *[!0-9]*) echo "the step is a whole number" >&2; exit 2 ;; esac

id=msg_$(openssl rand -hex 16)
now=$(date +%s)
body='{"type":"checkpoint.saved","timestamp":"'$(date -u +%FT%TZ)'","data":{"uri":"'$uri'","run":"'$run'","step":'${step:-null}'}}'
key=$(printf %s "${CKPT_HOOK_SECRET#whsec_}" | openssl base64 -d -A | od -An -vtx1 | tr -d ' \n')
signature=$(printf %s "$id.$now.$body" | openssl dgst -sha256 -mac HMAC -macopt "hexkey:$key" -binary | openssl base64 -A)

# A repeat has the same id and is taken for one. The signed time is good for five minutes.
printf %s "$body" | curl --silent --show-error --fail-with-body --max-time 20 --retry 6 --retry-max-time 240 \
  --retry-connrefused --data-binary @- \
  -H "content-type: application/json" -H "webhook-id: $id" -H "webhook-timestamp: $now" \
  -H "webhook-signature: v1,$signature" "$CKPT_HOOK_URL"
echo
