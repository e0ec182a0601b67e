# Sourced by the batch scripts: run a command, pass on what Slurm signals to the script, requeue what ran out of time, and start
# again what a lost rank or node has ended.
#
# SIGUSR1 (--signal=B:USR1@300) announces the time limit: the run saves, and the job is requeued if that succeeded. SIGTERM
# (scancel, preemption) saves too; whether the job comes back is Slurm's decision. Both reach the command as SIGUSR1, because
# srun answers a SIGTERM of its own by killing its tasks.
run_until_stopped() {
  local child status=0 is_out_of_time=
  # Before the start: a signal that comes right after it must not end this script. $! is the command.
  trap 'is_stopped=1; is_out_of_time=1; kill -USR1 $! || true' USR1
  trap 'is_stopped=1; kill -USR1 $! || true' TERM
  "$@" &
  child=$!
  # A signal ends `wait` before the command has ended.
  while kill -0 "$child" 2>/dev/null; do wait "$child" || true; done
  wait "$child" || status=$?
  if [[ $status -eq 0 && -n $is_out_of_time ]]; then
    scontrol requeue "$SLURM_JOB_ID"
  fi
  return "$status"
}

# run_with_restarts COMMAND...: the same, and start the command again from its last checkpoint if it fails, at most RESTARTS
# times (3) and only while checkpoints are added; then requeue the job, which may get other nodes, at most REQUEUES times (3). A
# run that was stopped, or refuses its settings (exit code 2), is not started again.
run_with_restarts() {
  local word run_dir= status restarts=0 saved before=never is_stopped=
  for word in "$@"; do if [[ $word == run.dir=* ]]; then run_dir=${word#run.dir=}; fi; done
  while :; do
    status=0
    run_until_stopped "$@" || status=$?
    [[ $status -eq 0 || $status -eq 2 || -n $is_stopped ]] && return "$status"
    saved=$(cat "$run_dir/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo none)
    [[ $restarts -ge ${RESTARTS:-3} || $saved == "$before" ]] && break
    restarts=$((restarts + 1)) before=$saved
    echo "exit code $status: restart $restarts of ${RESTARTS:-3}, from checkpoint $saved" >&2
  done
  if [[ -n ${SLURM_JOB_ID:-} && ${SLURM_RESTART_COUNT:-0} -lt ${REQUEUES:-3} ]]; then
    echo "exit code $status after checkpoint $saved: the job is requeued" >&2
    scontrol requeue "$SLURM_JOB_ID"
  fi
  return "$status"
}
