-- Which causes took the GPU time that the sweep reserved, and how much of it was useful?
-- All rows add up to what was reserved. A row named as a `failure_kind` has the attempts that failed so; `superseded` has measurements that no longer count.
WITH used AS (
    SELECT
        sum(useful_gpu_seconds) AS useful,
        sum(warmup_gpu_seconds) AS warmup,
        sum(startup_gpu_seconds) AS startup,
        sum(profile_gpu_seconds) AS profile,
        sum(under_way_gpu_seconds) AS under_way,
        sum(idle_gpu_seconds) AS idle,
        sum(reserved_gpu_seconds) AS reserved
    FROM v_gpu_seconds
    WHERE sweep = :sweep
),
causes AS (
    SELECT 'useful' AS cause, useful AS gpu_seconds FROM used
    UNION ALL
    SELECT 'warmup', warmup FROM used
    UNION ALL
    SELECT 'startup', startup FROM used
    UNION ALL
    SELECT 'profile', profile FROM used
    UNION ALL
    SELECT 'under_way', under_way FROM used
    UNION ALL
    SELECT 'idle', idle FROM used
    UNION ALL
    SELECT coalesce(attempt.failure_kind, 'superseded'), sum(attempt.gpu_seconds)
    FROM attempt
    JOIN trial ON trial.id = attempt.trial_id
    JOIN sweep ON sweep.id = trial.sweep_id
    WHERE sweep.name = :sweep AND attempt.gpu_seconds IS NOT NULL
        AND NOT (attempt.state = 'measured' AND (attempt.pooled OR NOT attempt.superseded))
    GROUP BY 1
)
SELECT
    causes.cause,
    causes.gpu_seconds / 3600 AS gpu_hours,
    causes.gpu_seconds / nullif(used.reserved, 0) AS fraction
FROM causes
CROSS JOIN used
WHERE causes.gpu_seconds > 0
ORDER BY causes.gpu_seconds DESC, causes.cause
