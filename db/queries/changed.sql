-- What changed between two fingerprints: the software, and the speed of layouts measured with both?
-- before (text): the beginning of a digest; default: the newest fingerprint of the sweep but one
-- after (text): the beginning of a digest; default: the newest fingerprint of the sweep
-- A change is noise if the 95 % intervals overlap, or if it is smaller than the noise floor of the cell.
-- Measurements with another fingerprint than the newest of their cell are compared even if they were invalidated since.
WITH seen AS (
    SELECT attempt.fingerprint_digest AS digest, row_number() OVER (ORDER BY max(attempt.id) DESC) AS place
    FROM attempt
    JOIN trial ON trial.id = attempt.trial_id
    JOIN sweep ON sweep.id = trial.sweep_id
    WHERE sweep.name = :sweep AND attempt.state = 'measured' AND attempt.fingerprint_digest IS NOT NULL
    GROUP BY attempt.fingerprint_digest
),
asked AS (
    SELECT
        (SELECT min(digest) FROM seen WHERE CASE WHEN CAST(:before AS text) IS NULL THEN place = 2 ELSE digest LIKE CAST(:before AS text) || '%' END) AS before_digest,
        (SELECT min(digest) FROM seen WHERE CASE WHEN CAST(:after AS text) IS NULL THEN place = 1 ELSE digest LIKE CAST(:after AS text) || '%' END) AS after_digest
),
means AS (
    SELECT
        trial.id AS trial_id,
        trial.cell_id,
        trial.layout_key AS layout,
        attempt.fingerprint_digest AS digest,
        avg(measurement.tokens_per_second_per_gpu) AS speed,
        avg(measurement.relative_confidence) AS confidence
    FROM asked
    CROSS JOIN trial
    JOIN sweep ON sweep.id = trial.sweep_id
    JOIN cell ON cell.id = trial.cell_id
    JOIN attempt ON attempt.trial_id = trial.id AND attempt.fingerprint_digest IN (asked.before_digest, asked.after_digest)
    JOIN measurement ON measurement.attempt_id = attempt.id
    -- A trial with one attempt was not measured with both.
    WHERE sweep.name = :sweep AND trial.num_attempts > 1 AND attempt.state = 'measured'
        AND measurement.implausible IS NULL AND measurement.step_seconds_bound IS NULL
        AND (attempt.pooled OR NOT attempt.superseded OR attempt.fingerprint_digest <> coalesce(cell.fingerprint_digest, ''))
    GROUP BY trial.id, trial.cell_id, trial.layout_key, attempt.fingerprint_digest
),
pairs AS (
    SELECT
        older.cell_id,
        older.trial_id,
        older.layout,
        older.speed AS before_speed,
        newer.speed AS after_speed,
        newer.speed / older.speed - 1 AS change,
        older.confidence + newer.confidence AS widths
    FROM asked
    JOIN means AS older ON older.digest = asked.before_digest
    JOIN means AS newer ON newer.digest = asked.after_digest AND newer.trial_id = older.trial_id
),
repeats AS (
    SELECT
        trial.cell_id,
        attempt.number > first_value(attempt.number) OVER of_trial AS is_repeat,
        abs(measurement.step_seconds_median / first_value(measurement.step_seconds_median) OVER of_trial - 1) AS change
    FROM trial
    JOIN sweep ON sweep.id = trial.sweep_id
    JOIN attempt ON attempt.trial_id = trial.id AND attempt.pooled
    JOIN measurement ON measurement.attempt_id = attempt.id
    -- The others have no repeat.
    WHERE sweep.name = :sweep AND trial.num_measurements > 1
    WINDOW of_trial AS (PARTITION BY trial.id ORDER BY attempt.number)
),
floors AS (
    SELECT cell_id, avg(change) AS noise_floor FROM repeats WHERE is_repeat GROUP BY cell_id
),
judged AS (
    SELECT
        pairs.*,
        cell.key AS cell,
        CASE WHEN coalesce(pairs.widths, 0) > coalesce(floors.noise_floor, 0) THEN pairs.widths ELSE coalesce(floors.noise_floor, pairs.widths) END AS noise
    FROM pairs
    JOIN cell ON cell.id = pairs.cell_id
    LEFT JOIN floors ON floors.cell_id = pairs.cell_id
),
software AS (
    SELECT
        older.digest AS before_digest,
        newer.digest AS after_digest,
        trim(
            CASE WHEN older.orchestrator_version <> newer.orchestrator_version THEN 'layout-sweep ' || older.orchestrator_version || ' -> ' || newer.orchestrator_version || '; ' ELSE '' END
            || CASE WHEN coalesce(older.git_sha, '') <> coalesce(newer.git_sha, '') THEN 'git ' || coalesce(older.git_sha, 'unknown') || ' -> ' || coalesce(newer.git_sha, 'unknown') || '; ' ELSE '' END
            || CASE WHEN coalesce(older.dirty_diff_digest, '') <> coalesce(newer.dirty_diff_digest, '') THEN 'uncommitted changes; ' ELSE '' END
            || CASE WHEN coalesce(older.python, '') <> coalesce(newer.python, '') THEN 'python ' || coalesce(older.python, 'unknown') || ' -> ' || coalesce(newer.python, 'unknown') || '; ' ELSE '' END
            || CASE WHEN coalesce(older.torch, '') <> coalesce(newer.torch, '') THEN 'torch ' || coalesce(older.torch, 'unknown') || ' -> ' || coalesce(newer.torch, 'unknown') || '; ' ELSE '' END
            || CASE WHEN coalesce(older.cuda, '') <> coalesce(newer.cuda, '') THEN 'cuda ' || coalesce(older.cuda, 'unknown') || ' -> ' || coalesce(newer.cuda, 'unknown') || '; ' ELSE '' END
            || CASE WHEN coalesce(older.nccl, '') <> coalesce(newer.nccl, '') THEN 'nccl ' || coalesce(older.nccl, 'unknown') || ' -> ' || coalesce(newer.nccl, 'unknown') || '; ' ELSE '' END
            || CASE WHEN coalesce(older.driver, '') <> coalesce(newer.driver, '') THEN 'driver ' || coalesce(older.driver, 'unknown') || ' -> ' || coalesce(newer.driver, 'unknown') || '; ' ELSE '' END
            || CASE WHEN coalesce(older.device_name, '') <> coalesce(newer.device_name, '') THEN 'device ' || coalesce(older.device_name, 'unknown') || ' -> ' || coalesce(newer.device_name, 'unknown') || '; ' ELSE '' END
            || CASE WHEN coalesce(CAST(older.settings AS text), '') <> coalesce(CAST(newer.settings AS text), '') THEN 'settings; ' ELSE '' END
            || CASE WHEN coalesce(CAST(older.packages AS text), '') <> coalesce(CAST(newer.packages AS text), '') THEN 'packages; ' ELSE '' END,
            '; '
        ) AS differences
    FROM asked
    JOIN fingerprint AS older ON older.digest = asked.before_digest
    JOIN fingerprint AS newer ON newer.digest = asked.after_digest
)
SELECT
    software.before_digest,
    software.after_digest,
    software.differences,
    judged.cell,
    judged.trial_id,
    judged.layout,
    judged.before_speed,
    judged.after_speed,
    judged.change,
    judged.noise,
    CASE
        WHEN judged.noise IS NULL THEN NULL
        WHEN abs(judged.change) <= judged.noise THEN 'noise'
        WHEN judged.change > 0 THEN 'faster'
        ELSE 'slower'
    END AS verdict
FROM software
LEFT JOIN judged ON 1 = 1
ORDER BY judged.cell, judged.change, judged.trial_id
