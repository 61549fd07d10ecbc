-- What changed between two fingerprints: the software, and the speed of layouts measured with both?
-- before (text): the beginning of a digest; default: the newest fingerprint of the sweep but one
-- after (text): the beginning of a digest; default: the newest fingerprint of the sweep
-- Each speed is the geometric mean of its runs. A change is noise if the 95 % intervals overlap, as in `sweep compare`.
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
runs AS (
    SELECT
        trial.id AS trial_id,
        trial.cell_id,
        cell.key AS cell,
        trial.layout_key AS layout,
        attempt.fingerprint_digest AS digest,
        ln(measurement.tokens_per_second_per_gpu) AS log_speed,
        coalesce(measurement.relative_confidence, 0) / 1.96 AS own_sd
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
),
moments AS (
    SELECT
        trial_id, cell_id, cell, layout, digest,
        count(*) AS num_runs,
        avg(log_speed) AS mean,
        max(own_sd) AS own_sd,
        sum(log_speed * log_speed) - count(*) * avg(log_speed) * avg(log_speed) AS squares
    FROM runs
    GROUP BY trial_id, cell_id, cell, layout, digest
),
-- The variance of one run: that of its steps, that of the runs, or that of usual repeats (2 %).
variances AS (
    SELECT
        moments.*,
        CASE WHEN own_sd > 0.02 THEN own_sd * own_sd ELSE 0.0004 END AS least,
        CASE WHEN num_runs > 1 THEN squares / (num_runs - 1) ELSE 0 END AS seen
    FROM moments
),
speeds AS (
    SELECT
        variances.*,
        1.96 * sqrt((CASE WHEN seen > least THEN seen ELSE least END) / num_runs) AS width
    FROM variances
),
-- One row per layout with both sides, without a join: PostgreSQL plans those badly before it knows how large they are.
pairs AS (
    SELECT
        trial_id, cell_id, cell, layout,
        max(CASE WHEN digest = before_digest THEN mean END) AS before_mean,
        max(CASE WHEN digest = before_digest THEN width END) AS before_width,
        max(CASE WHEN digest = after_digest THEN mean END) AS after_mean,
        max(CASE WHEN digest = after_digest THEN width END) AS after_width
    FROM speeds
    CROSS JOIN asked
    GROUP BY trial_id, cell_id, cell, layout
),
judged AS (
    SELECT
        cell,
        trial_id,
        layout,
        exp(before_mean) AS before_speed,
        exp(before_mean - before_width) AS before_low,
        exp(before_mean + before_width) AS before_high,
        exp(after_mean) AS after_speed,
        exp(after_mean - after_width) AS after_low,
        exp(after_mean + after_width) AS after_high,
        exp(after_mean - before_mean) - 1 AS change
    FROM pairs
    WHERE before_mean IS NOT NULL AND after_mean IS NOT NULL
),
software AS (
    SELECT
        older.digest AS before_digest,
        newer.digest AS after_digest,
        trim(
            CASE WHEN older.orchestrator_version <> newer.orchestrator_version THEN 'layout-sweep ' || older.orchestrator_version || ' -> ' || newer.orchestrator_version || '; ' ELSE '' END
            || CASE WHEN coalesce(older.git_sha, '') <> coalesce(newer.git_sha, '') THEN 'git ' || coalesce(older.git_sha, 'unknown') || ' -> ' || coalesce(newer.git_sha, 'unknown') || '; ' ELSE '' END
            || CASE WHEN coalesce(older.dirty_diff_digest, '') <> coalesce(newer.dirty_diff_digest, '') THEN CASE WHEN older.git_sha IS NULL OR newer.git_sha IS NULL THEN 'the program''s files; ' ELSE 'uncommitted changes; ' END ELSE '' END
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
    judged.before_low,
    judged.before_high,
    judged.after_speed,
    judged.after_low,
    judged.after_high,
    judged.change,
    CASE
        WHEN judged.after_low > judged.before_high THEN 'faster'
        WHEN judged.after_high < judged.before_low THEN 'slower'
        WHEN judged.change IS NOT NULL THEN 'noise'
    END AS verdict
FROM software
LEFT JOIN judged ON 1 = 1
ORDER BY judged.cell, judged.change, judged.trial_id
