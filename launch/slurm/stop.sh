# Sourced by the batch scripts: run a command, pass on what Slurm signals to the script, requeue what ran out of time.
#
# SIGUSR1 (--signal=B:USR1@300) announces the time limit: the run saves, and the job is requeued if that succeeded. SIGTERM
# (scancel, preemption) saves too; whether the job comes back is Slurm's decision. Both reach the command as SIGUSR1, because
# srun answers a SIGTERM of its own by killing its tasks.
run_until_stopped() {
  local child status=0 is_out_of_time=
  # Before the start: a signal that comes right after it must not end this script. $! is the command.
  trap 'is_out_of_time=1; kill -USR1 $! || true' USR1
  trap 'kill -USR1 $! || true' TERM
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
