use baton_proto::v1::Outcome as WireOutcome;
use insta::assert_snapshot;

use super::*;
use crate::testing;

#[test]
fn status_before_any_agent_joined() {
    assert_snapshot!(status(&testing::gathering(), Paint::Plain));
}

#[test]
fn status_while_training() {
    assert_snapshot!(status(&testing::training(), Paint::Plain));
}

#[test]
fn status_shows_the_beginning_of_generated_texts() {
    let mut training = testing::training();
    let text = format!("def f(x):\n    return {}", "x".repeat(200));
    let text = GeneratedText { sample: 12, text, ..GeneratedText::default() };
    training.evaluation.as_mut().unwrap().texts = vec![text];
    let status = status(&training, Paint::Plain);
    let line = status.lines().find(|line| line.contains("  wrote ")).unwrap();
    assert_eq!(line, format!("  wrote       for sample 12: def f(x): return {}…", "x".repeat(83)));
}

#[test]
fn status_while_recovering() {
    assert_snapshot!(status(&testing::recovering(), Paint::Plain));
}

#[test]
fn status_shows_the_newest_recoveries_and_names_the_command_for_the_others() {
    assert_snapshot!(status(&testing::recovering_again(), Paint::Plain));
}

#[test]
fn a_recovery_is_current_until_a_later_generation_or_the_jobs_end() {
    let recovering = testing::recovering();
    assert_eq!(current_recovery(&recovering), recovering.recoveries.last());
    assert_eq!(current_recovery(&testing::training()), None, "it is done");
    let rolled_back = GetStatusResponse { generation: 4, ..testing::recovering() };
    assert_eq!(current_recovery(&rolled_back), None);
    let ended = GetStatusResponse { outcome: testing::failed().outcome, ..testing::recovering() };
    assert_eq!(current_recovery(&ended), None);
}

#[test]
fn status_while_draining() {
    assert_snapshot!(status(&testing::draining(), Paint::Plain));
}

#[test]
fn status_while_paused() {
    assert_snapshot!(status(&testing::paused(), Paint::Plain));
}

#[test]
fn status_without_a_job() {
    assert_snapshot!(status(&testing::idle(), Paint::Plain));
}

#[test]
fn status_of_machines_with_gpus() {
    assert_snapshot!(status(&testing::on_gpus(), Paint::Plain));
}

#[test]
fn json_status_of_machines_with_gpus() {
    assert_snapshot!(pretty(&testing::on_gpus()));
}

#[test]
fn log_lines_show_their_writer() {
    let all = |paint| {
        let lines: Vec<String> =
            testing::lines().iter().map(|line| log_line(line, paint)).collect();
        lines.join("\n")
    };
    assert_snapshot!(all(Paint::Plain));
    assert!(all(Paint::Colours).contains("\x1b[38;5;74mrank 0\x1b[0m │ took"));
}

#[test]
fn foreign_text_does_not_control_the_terminal() {
    let mut hostile = testing::on_gpus();
    hostile.name = "\x1b]0;title\x07".to_owned();
    hostile.reason = "\x1b[2Jgone".to_owned();
    hostile.nodes[0].node_id = "a\x1b[31m\nb".to_owned();
    hostile.recoveries[0].cause = "\u{9b}2J".to_owned();
    let text = status(&hostile, Paint::Plain);
    let lines = status(&testing::on_gpus(), Paint::Plain).lines().count();
    assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
    assert_eq!(text.lines().count(), lines);
}

#[test]
fn status_once_completed() {
    assert_snapshot!(status(&testing::completed(), Paint::Plain));
}

#[test]
fn status_once_failed() {
    assert_snapshot!(status(&testing::failed(), Paint::Plain));
}

#[test]
fn status_of_a_regression() {
    assert_snapshot!(status(&testing::regression(), Paint::Plain));
}

#[test]
fn status_once_a_limit_is_reached() {
    assert_snapshot!(status(&testing::limited(), Paint::Plain));
}

#[test]
fn json_status_of_a_regression() {
    assert_snapshot!(pretty(&testing::regression()));
}

#[test]
fn end_of_a_job_that_reached_its_limit() {
    assert_snapshot!(end(&testing::limited(), &[]));
}

#[test]
fn the_last_divergence_names_no_generation_that_took_over() {
    let mut last = testing::training().incidents.remove(0);
    last.rollback = None;
    last.remedy = "the job ended".to_owned();
    let text = incident(&last);
    assert!(text.ends_with("(epoch 3, sample 256 of it): the job ended"), "{text}");
}

#[test]
fn spending_without_cost_or_limit_is_not_shown() {
    assert_eq!(spending(&Spending::default()), None);
    let limited = Spending { most_hours: Some(2.0), ..Spending::default() };
    assert_eq!(spending(&limited).as_deref(), Some("0.0 s of 2 h 00 min"));
}

#[test]
fn the_share_of_a_job_counts_samples_for_any_batch_size() {
    let share = |epoch, step_of_epoch, steps_per_epoch| {
        let step = Step { epoch, step_of_epoch, steps_per_epoch, ..Step::default() };
        Position::new(&step, 4).share
    };
    assert_eq!([share(1, 5, 10), share(1, 10, 20)], [0.375, 0.375]);
}

fn pretty(status: &GetStatusResponse) -> String {
    serde_json::to_string_pretty(status).unwrap()
}

#[test]
fn json_status_while_training() {
    assert_snapshot!(pretty(&testing::training()));
}

#[test]
fn json_status_once_failed() {
    assert_snapshot!(pretty(&testing::failed()));
}

#[test]
fn progress_in_one_line() {
    assert_snapshot!(progress_line(&testing::training()).unwrap());
    assert_eq!(progress_line(&testing::gathering()), None);
}

#[test]
fn colours_do_not_change_the_text() {
    let coloured = status(&testing::training(), Paint::Colours);
    assert!(coloured.contains("\x1b[32mtraining\x1b[0m"), "{coloured}");
    let codes = ["\x1b[0m", "\x1b[1m", "\x1b[32m"];
    let bare = codes.iter().fold(coloured, |text, code| text.replace(code, ""));
    assert_eq!(bare, status(&testing::training(), Paint::Plain));
}

fn position(step: u64, epoch: u32) -> (u32, u64, f64) {
    let step_of_epoch = step - 10 * u64::from(epoch);
    let step = Step { step, epoch, step_of_epoch, steps_per_epoch: 10, ..Step::default() };
    let Position { epoch, step_of_epoch, share } = Position::new(&step, 4);
    (epoch, step_of_epoch, share)
}

#[test]
fn epochs_are_counted_from_one_and_the_last_one_ends_full() {
    assert_eq!(position(0, 0), (1, 0, 0.0));
    assert_eq!(position(9, 0), (1, 9, 0.225));
    assert_eq!(position(10, 1), (2, 0, 0.25));
    assert_eq!(position(40, 4), (4, 10, 1.0));
}

#[test]
fn a_job_of_unknown_length_has_no_progress() {
    assert_eq!(Position::new(&Step::default(), 0).share, 0.0);
}

#[test]
fn ranks_are_grouped_by_state() {
    let rank = |(rank, state): (u32, &str)| RankStatus {
        rank,
        state: state.to_owned(),
        ..RankStatus::default()
    };
    let all = [(0, "training"), (3, "training"), (1, "training"), (2, "starting"), (7, "starting")];
    let text = ranks(&all.map(rank)).unwrap();
    assert_eq!(text, "training 0-1, 3; starting 2, 7");
}

#[test]
fn a_slow_stuck_or_silent_rank_is_shown_as_such() {
    let heartbeat = v1::RankHeartbeat {
        activity: v1::Activity::Loading.into(),
        seconds: 31.2,
        step: 7,
        own_step_seconds: 0.9,
    };
    let rank = RankStatus {
        heartbeat: Some(heartbeat),
        heartbeat_age_seconds: Some(12.0),
        slowdown: Some(1.8),
        ..RankStatus::default()
    };
    let line = rank_line(&rank).unwrap();
    assert!(
        line.ends_with("SLOW: 1.8 times the median  loading for 31 s  NO HEARTBEAT for 12 s"),
        "{line}"
    );
    assert_eq!(rank_line(&RankStatus::default()), None);
}

#[test]
fn skipped_samples_are_shown_only_if_there_are_any() {
    assert_eq!(skipped(&testing::gathering()), None);
    // The ranks that could report the reason have ended.
    let status = GetStatusResponse { skipped_samples: 1, ..testing::completed() };
    assert_eq!(skipped(&status).as_deref(), Some("1 bad sample"));
}

#[test]
fn events_show_time_and_message() {
    let saved = WatchEventsResponse {
        id: 7,
        unix_millis: 1_795_252_508_250,
        kind: Kind::Saved.into(),
        generation: 2,
        step: Some(88),
        message: "checkpoint step-88 committed".to_owned(),
    };
    assert_eq!(
        event(&saved, Day::Shown, Paint::Plain),
        "2026-11-21T09:15:08Z  checkpoint step-88 committed"
    );
    assert_eq!(event(&saved, Day::Hidden, Paint::Plain), "09:15:08Z  checkpoint step-88 committed");
}

fn run(overrides: &[String]) -> RunInfo<'_> {
    RunInfo {
        is_reported: true,
        recipe: Path::new("recipes/digits_cpu.toml"),
        overrides,
        run_dir: Path::new("runs/my digits"),
        validation_set: "assets/digits/digits-val.beton",
        evaluates: true,
    }
}

fn end(status: &GetStatusResponse, overrides: &[String]) -> String {
    let wire: WireOutcome = status.outcome.clone().unwrap();
    ending(status, &wire.known().unwrap(), &run(overrides))
}

#[test]
fn a_fresh_start_keeps_folder_and_changes() {
    let overrides = ["train.epochs=16".to_owned(), "augment.crop_scale=[0.8, 1.0]".to_owned()];
    assert_eq!(
        fresh_start_command(&run(&overrides)),
        "baton up recipes/digits_cpu.toml --set train.epochs=16 --set 'augment.crop_scale=[0.8, 1.0]' \
         --run-dir 'runs/my digits' --no-auto-resume"
    );
}

#[test]
fn end_of_a_completed_job() {
    assert_snapshot!(end(&testing::completed(), &["train.epochs=16".to_owned()]));
}

#[test]
fn the_end_of_a_job_that_ended_elsewhere_names_its_checkpoints() {
    let status = testing::completed();
    let wire: WireOutcome = status.outcome.clone().unwrap();
    let text = ending(&status, &wire.known().unwrap(), &RunInfo { is_reported: false, ..run(&[]) });
    let location = &status.checkpoint_location;
    assert!(text.contains(&format!("  baton checkpoint ls --dir {location}\n")), "{text}");
}

#[test]
fn the_end_shows_skipped_samples() {
    let lossy = GetStatusResponse { skipped_samples: 12, ..testing::completed() };
    let text = end(&lossy, &[]);
    assert!(text.contains("\n  skipped     12 bad samples\n"), "{text}");
}

#[test]
fn end_of_a_failed_job() {
    assert_snapshot!(end(&testing::failed(), &[]));
}

#[test]
fn words_for_a_shell_stay_one_word() {
    assert_eq!(shell_quoted("runs/digits_cpu"), "runs/digits_cpu");
    assert_eq!(shell_quoted("it's here"), r"'it'\''s here'");
    assert_eq!(shell_quoted(""), "''");
}
