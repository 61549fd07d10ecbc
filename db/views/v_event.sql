-- The log of events, with the names of sweep, cell and layout.
-- event_id: number of the event; grows
CREATE VIEW v_event AS
SELECT
    event.id AS event_id,
    event.at,
    sweep.name AS sweep,
    cell.key AS cell,
    event.trial_id,
    trial.layout_key AS layout,
    event.attempt,
    event.event,
    event.from_state,
    event.to_state,
    event.epoch,
    event.detail
FROM event
JOIN sweep ON sweep.id = event.sweep_id
LEFT JOIN trial ON trial.id = event.trial_id
LEFT JOIN cell ON cell.id = trial.cell_id
