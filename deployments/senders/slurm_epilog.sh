#!/bin/bash
# EpilogSlurmctld: announce the checkpoint of a job that succeeded. In slurm.conf:
#
#   EpilogSlurmctld=/etc/slurm/ckptcore_epilog.sh
#
# A job names its checkpoint in its comment: sbatch --comment="ckpt=/checkpoints/llama/step-300 run=llama step=300".
# /etc/ckptcore/hook.url has the address, /etc/ckptcore/hook.header the line "Authorization: Bearer TOKEN";
# both belong to SlurmUser, mode 0400. Slurm sets no PATH. A script that fails or takes long would disturb
# the controller: this one always succeeds, at once.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
etc=${CKPTCORE_HOOK_ETC:-/etc/ckptcore} log=${CKPTCORE_HOOK_LOG:-/dev/null}

[ "${SLURM_JOB_EXIT_CODE2:-0:0}" = "0:0" ] || exit 0
uri='' run=${SLURM_JOB_NAME:-} step=null
set -f   # the comment comes from the user: no globbing
for word in ${SLURM_JOB_COMMENT:-}; do
  case "$word" in
    ckpt=*) uri=${word#ckpt=} ;;
    run=*) run=${word#run=} ;;
    step=*) step=${word#step=} ;;
  esac
done
[ -n "$uri" ] || exit 0
case "$uri$run" in *[\"\\[:cntrl:]]*) exit 0 ;; esac
case "$step" in null) ;; '' | *[!0-9]*) exit 0 ;; esac
while [[ $step == 0?* ]]; do step=${step#0}; done   # JSON has no 0300

case "${SLURM_JOB_USER:-}" in *[\"\\[:cntrl:]]*) user='' ;; *) user=${SLURM_JOB_USER:-} ;; esac
body='{"type":"job.completed","uri":"'$uri'","run":"'$run'","step":'$step',"meta":{"user":"'$user'","slurm_job":"'${SLURM_JOB_ID:-}'"}}'
# The job's id makes a repeat the same event; a requeued job has another start time.
send() {
  printf %s "$body" | curl --silent --show-error --max-time 20 --retry 5 --retry-connrefused --retry-max-time 300 \
    --data-binary @- -H 'content-type: application/json' -H "@$etc/hook.header" \
    -H "idempotency-key: slurm-${SLURM_CLUSTER_NAME:-cluster}-${SLURM_JOB_ID:-0}-${SLURM_JOB_START_TIME:-0}" \
    "$(cat "$etc/hook.url")"
}
# curl does not retry if the connection is lost during the reply.
{
for wait in 1 5 20 60 ''; do
  send
  case $? in 7 | 18 | 28 | 52 | 55 | 56) [ -z "$wait" ] || sleep "$wait" ;; *) break ;; esac
done
} > "$log" 2>&1 &
exit 0
