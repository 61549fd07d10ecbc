-- On which nodes do attempts fail in ways that the machine may have caused, and how often?
-- measured_elsewhere counts the failures of trials that another attempt measured: their layout did not cause them.
WITH failed AS (
    SELECT
        attempt.failure_node AS node,
        count(*) AS failures,
        sum(CASE WHEN trial.state = 'measured' THEN 1 ELSE 0 END) AS measured_elsewhere,
        max(attempt.failure_message) AS for_example
    FROM attempt
    JOIN trial ON trial.id = attempt.trial_id
    JOIN sweep ON sweep.id = trial.sweep_id
    WHERE sweep.name = :sweep AND attempt.failure_node IS NOT NULL
        AND attempt.failure_kind IN ('device_error', 'hung', 'killed', 'launch_failed', 'nccl', 'node_lost', 'orchestrator_lost', 'port_clash', 'preempted', 'start_timeout', 'storage', 'xid')
    GROUP BY attempt.failure_node
),
gangs AS (
    SELECT CAST(attempt.nodes AS text) AS nodes, count(*) AS attempts
    FROM attempt
    JOIN trial ON trial.id = attempt.trial_id
    JOIN sweep ON sweep.id = trial.sweep_id
    WHERE sweep.name = :sweep AND attempt.nodes IS NOT NULL
    GROUP BY 1
)
SELECT
    failed.node,
    failed.failures,
    coalesce(sum(gangs.attempts), 0) AS attempts,
    CAST(failed.failures AS double precision) / sum(gangs.attempts) AS failing,
    failed.measured_elsewhere,
    failed.for_example
FROM failed
-- The list is JSON, which no function of both databases reads: a name in quotes is looked for.
LEFT JOIN gangs ON replace(gangs.nodes, '"' || failed.node || '"', '') <> gangs.nodes
GROUP BY failed.node, failed.failures, failed.measured_elsewhere, failed.for_example
ORDER BY failed.failures DESC, failed.node
