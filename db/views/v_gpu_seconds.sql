-- The uses of reserved GPU-seconds: one row per cell with what its attempts reserved, and one per sweep, without a cell, with the rest. All rows of a sweep add up to what it reserved.
-- useful_gpu_seconds: in timed steps of measurements that count: [reserved GPU-seconds](measuring.md#reserved-gpu-seconds)
-- warmup_gpu_seconds: in the steps before these
-- startup_gpu_seconds: in the rest of these attempts, around and between their steps
-- failed_gpu_seconds: in attempts without a measurement that counts, except those of the next three columns
-- out_of_memory_gpu_seconds: in attempts that ran out of memory
-- lost_gpu_seconds: in attempts that were lost with their node or orchestrator, or preempted
-- cancelled_gpu_seconds: in attempts that a person ended: a second Ctrl-C, SIGTERM, `sweep cancel`
-- under_way_gpu_seconds: in attempts that had not ended when the orchestrator was last seen; NULL: not known by cell
CREATE VIEW v_gpu_seconds AS
SELECT
    sweep.id AS sweep_id,
    sweep.name AS sweep,
    cell.id AS cell_id,
    cell.key AS cell,
    coalesce(sum(CASE WHEN spent.outcome = 'counts' THEN spent.timed END), 0) AS useful_gpu_seconds,
    coalesce(sum(CASE WHEN spent.outcome = 'counts' THEN spent.warmup END), 0) AS warmup_gpu_seconds,
    coalesce(sum(CASE WHEN spent.outcome = 'counts' THEN spent.gpu_seconds - spent.timed - spent.warmup END), 0) AS startup_gpu_seconds,
    coalesce(sum(CASE WHEN spent.outcome = 'failed' THEN spent.gpu_seconds END), 0) AS failed_gpu_seconds,
    coalesce(sum(CASE WHEN spent.outcome = 'out_of_memory' THEN spent.gpu_seconds END), 0) AS out_of_memory_gpu_seconds,
    coalesce(sum(CASE WHEN spent.outcome = 'lost' THEN spent.gpu_seconds END), 0) AS lost_gpu_seconds,
    coalesce(sum(CASE WHEN spent.outcome = 'cancelled' THEN spent.gpu_seconds END), 0) AS cancelled_gpu_seconds,
    NULL AS under_way_gpu_seconds,
    NULL AS idle_gpu_seconds,
    coalesce(sum(spent.gpu_seconds), 0) AS reserved_gpu_seconds,
    NULL AS capacity_gpu_seconds
FROM cell
JOIN sweep ON sweep.id = cell.sweep_id
LEFT JOIN (
    SELECT
        trial.cell_id,
        attempt.gpu_seconds,
        coalesce(attempt.timed_seconds, 0) * cell.num_gpus AS timed,
        coalesce(attempt.warmup_seconds, 0) * cell.num_gpus AS warmup,
        CASE
            WHEN attempt.state = 'measured' AND (attempt.pooled OR NOT attempt.superseded) THEN 'counts'
            WHEN attempt.failure_kind IN ('oom_gpu', 'oom_host') THEN 'out_of_memory'
            WHEN attempt.failure_kind IN ('node_lost', 'orchestrator_lost', 'preempted') THEN 'lost'
            WHEN attempt.failure_kind = 'cancelled' THEN 'cancelled'
            ELSE 'failed'
        END AS outcome
    FROM attempt
    JOIN trial ON trial.id = attempt.trial_id
    JOIN cell ON cell.id = trial.cell_id
    WHERE attempt.gpu_seconds IS NOT NULL
) AS spent ON spent.cell_id = cell.id
GROUP BY sweep.id, sweep.name, cell.id, cell.key
UNION ALL
SELECT
    sweep.id,
    sweep.name,
    NULL,
    NULL,
    0,
    0,
    0,
    0,
    0,
    0,
    0,
    coalesce(sum(leased.under_way), 0),
    coalesce(sum(leased.idle_gpu_seconds), 0),
    coalesce(sum(leased.under_way + leased.idle_gpu_seconds), 0),
    sum(leased.capacity_gpu_seconds)
FROM sweep
LEFT JOIN (
    SELECT
        unended.sweep_id,
        unended.idle_gpu_seconds,
        unended.capacity_gpu_seconds,
        -- An attempt that ended after its orchestrator was last seen is counted with its cell.
        CASE WHEN unended.rest > 0 AND unended.ended_at IS NULL THEN unended.rest ELSE 0 END AS under_way
    FROM (
        SELECT
            session.*,
            CASE WHEN session.ended_at IS NULL THEN session.reserved_gpu_seconds - session.idle_gpu_seconds - coalesce((
                SELECT sum(attempt.gpu_seconds)
                FROM attempt
                JOIN trial ON trial.id = attempt.trial_id
                WHERE trial.sweep_id = session.sweep_id AND attempt.epoch = session.epoch
            ), 0) END AS rest
        FROM session
    ) AS unended
) AS leased ON leased.sweep_id = sweep.id
GROUP BY sweep.id, sweep.name
