-- One row per trial: its cell, its layout, the numbers of the attempt that counts, and the failure of the last one.
-- sweep: the sweep's name
-- cell: the cell's key, such as `llama-3.1-8b_64gpu_s4096_gb1024`
-- model: the model's name in the sweep
-- layout: the layout's key, such as `dp8_tp1_pp1_cp1_mbs2_ga4_full_z0_bf16`
-- is_current_fingerprint: the same for a trial; NULL: not measured
-- last_attempt_state: how the last attempt ended
CREATE VIEW v_trial AS
SELECT
    trial.id AS trial_id,
    trial.sweep_id,
    sweep.name AS sweep,
    trial.cell_id,
    cell.key AS cell,
    cell.model_name AS model,
    cell.model_digest,
    model.num_parameters,
    cell.num_gpus,
    cell.sequence_length,
    cell.global_batch_size,
    trial.layout_key AS layout,
    {layout_columns},
    trial.state,
    trial.num_attempts,
    trial.num_measurements,
    trial.why,
    trial.predicted_tokens_per_second_per_gpu,
    trial.predicted_memory_bytes,
    trial.condemned_by,
    trial.reused_from,
    counting.number AS attempt,
    measurement.tokens_per_second,
    measurement.tokens_per_second_per_gpu,
    measurement.step_seconds_median,
    measurement.step_seconds_iqr,
    measurement.num_steps,
    measurement.relative_confidence,
    measurement.confident,
    measurement.implausible,
    measurement.unsteady,
    measurement.step_seconds_bound,
    measurement.mfu,
    measurement.hfu,
    measurement.mfu_formula,
    measurement.peak_flops,
    measurement.peak_flops_source,
    measurement.peak_memory_allocated_bytes,
    measurement.peak_memory_reserved_bytes,
    measurement.peak_memory_driver_bytes,
    measurement.peak_memory_driver_kind,
    measurement.peak_memory_active_bytes,
    measurement.inactive_split_bytes,
    measurement.device_used_bytes,
    measurement.device_memory_bytes,
    measurement.allocator_retries,
    measurement.allocator_ooms,
    measurement.thrashing,
    measurement.attention_kernel,
    measurement.compile_seconds,
    measurement.loss_first,
    measurement.loss_last,
    measurement.gpu_busy,
    measurement.gpu_power_watts,
    measurement.gpu_energy_joules,
    measurement.joules_per_token,
    measurement.gpu_clock_mhz,
    measurement.gpu_lowest_clock_mhz,
    measurement.sm_activity,
    measurement.tensor_activity,
    measurement.dram_activity,
    measurement.extra,
    counting.cpu_cores,
    counting.own_cpu_cores,
    counting.sweep_cpu_cores,
    counting.others_cpu_cores,
    counting.foreign_gpu_processes,
    counting.gpu_clock_ratio,
    counting.gpu_throttled_fraction,
    counting.gpu_throttle_reasons,
    counting.gpu_temperature_celsius,
    counting.fingerprint_digest,
    fingerprint.git_sha,
    fingerprint.dirty_diff_digest,
    fingerprint.python,
    fingerprint.torch,
    fingerprint.cuda,
    fingerprint.nccl,
    fingerprint.driver,
    fingerprint.device_name,
    -- Current is what the newest measurement of the cell was taken with. Unknown equals unknown.
    CASE WHEN counting.id IS NOT NULL
        THEN coalesce(counting.fingerprint_digest, '') = coalesce(cell.fingerprint_digest, '') END AS is_current_fingerprint,
    last.state AS last_attempt_state,
    last.failure_kind,
    last.failure_node,
    last.failure_rank,
    last.failure_message,
    last.gpu_seconds,
    trial.created_at,
    trial.updated_at
FROM trial
JOIN sweep ON sweep.id = trial.sweep_id
JOIN cell ON cell.id = trial.cell_id
JOIN model ON model.digest = cell.model_digest
LEFT JOIN attempt AS counting ON counting.trial_id = trial.id AND counting.state = 'measured' AND NOT counting.superseded
LEFT JOIN measurement ON measurement.attempt_id = counting.id
LEFT JOIN fingerprint ON fingerprint.digest = counting.fingerprint_digest
-- An invalidated failure is no longer the trial's.
LEFT JOIN attempt AS last ON last.trial_id = trial.id AND last.number = trial.num_attempts AND (last.pooled OR NOT last.superseded)
