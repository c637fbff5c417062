use baton_checkpoint::{Claimant, NewerVersion};
use baton_job::{Generation, JobId, message::Rollback};
use baton_proto::v1::CheckpointEntry;
use baton_recipe::{
    Step,
    progress::{Accuracy, Fit},
};
use insta::assert_snapshot;

use super::*;
use crate::{commands::checkpoint::samples, testing};

/// Two hours after the first step.
const NOW: u64 = 1_795_252_508 + 7_200;

fn rows(rollbacks: &[Rollback]) -> Vec<json::ListedCheckpoint> {
    let listed = with_decisions(&samples::run().store, rollbacks).unwrap();
    listed.iter().map(|(entry, decision)| row(entry, decision)).collect()
}

#[test]
fn listed_checkpoints_show_why_each_is_kept() {
    assert_snapshot!(text(&rows(&[]), NOW));
}

#[test]
fn listed_checkpoints_as_json() {
    let lines: Vec<String> = rows(&[]).iter().map(json::line).collect();
    assert_snapshot!(lines.join("\n"));
}

#[test]
fn a_newer_batons_checkpoint_is_not_listed_as_damaged() {
    let listed = with_decisions(&samples::of_a_newer_baton().store, &[]).unwrap();
    let row = row(&listed[0].0, &listed[0].1);
    assert_eq!((row.state, row.complete), ("newer", false));
    assert_eq!(row.kept_because.as_deref(), Some(["newer"].as_slice()));
    let text = text(&[row], NOW);
    assert!(text.contains("written by a newer Baton (format 99;"), "{text}");
    assert!(!text.contains("damaged"), "{text}");
}

#[test]
fn checkpoints_invalidated_by_a_rollback_are_removed() {
    let rollback =
        Rollback { generation: Generation(3), before: Step(70), suspect_from: None, skip: None };
    let rows = rows(&[rollback]);
    let decision = |step: u64| {
        let row = rows.iter().find(|row| row.step == Some(step)).unwrap();
        row.verdict.clone().unwrap()
    };
    assert_eq!(
        [110, 88, 66].map(decision),
        [
            "to be removed: training diverged here",
            "to be removed: training diverged here",
            "newest",
        ]
    );
}

#[test]
fn what_the_next_save_removes_is_known_from_the_run_and_not_guessed_from_the_job() {
    let sample = samples::run();
    let kept = || {
        let listed = with_decisions(&sample.store, &[]).unwrap();
        let (_, decision) = listed.iter().find(|(entry, _)| entry.id.generation.0 == 1).unwrap();
        decision.to_string()
    };
    assert_eq!(kept(), "outside this run");
    let claimant = Claimant {
        owner: String::new(),
        job: JobId(uuid::Uuid::from_u128(7)),
        name: String::new(),
        recipe: String::new(),
        host: String::new(),
        run_dir: String::new(),
        not_before: Some(Generation(0)),
    };
    // The job went on with the checkpoints of another one, under a new id.
    let fence = sample.folder.path().join("fences/000002");
    std::fs::write(fence, serde_json::json!(claimant).to_string()).unwrap();
    assert_eq!(kept(), "every 4 epochs");
    // The next one has another recipe, and has saved nothing yet.
    let recipe = r#"{"checkpoint":{"keep_last":1,"keep_every_epochs":2}}"#.to_owned();
    let claimant = Claimant { owner: "next".to_owned(), recipe, ..claimant };
    sample.store.claim(Generation(9), &claimant).unwrap();
    assert_eq!(kept(), "every 2 epochs");
}

#[test]
fn the_metric_of_a_regression_is_its_correlation() {
    let fit = |spearman| {
        let fit = Some(Fit { mae: 0.125, pearson: 0.9, spearman });
        v1::Accuracy::from(Accuracy::from_legacy_fields(8, 0.5, (0.0, 0.0), fit))
    };
    assert_eq!(metric(&fit(0.912)), "Spearman 0.9120, Pearson 0.9000, MAE 0.1250");
}

#[test]
fn a_folder_read_by_the_coordinator_is_listed_without_reasons() {
    let complete = CheckpointEntry {
        name: "step-0000000088-gen-000002".to_owned(),
        complete: true,
        checkpoint: testing::training().checkpoint,
        epoch: 4,
        created_unix_seconds: NOW - 600,
        ..CheckpointEntry::default()
    };
    let damaged = CheckpointEntry {
        name: "step-0000000066-gen-000001".to_owned(),
        damage: "shard-00001-of-00002.safetensors is missing".to_owned(),
        ..CheckpointEntry::default()
    };
    let unfinished = CheckpointEntry {
        name: "step-0000000044-gen-000001".to_owned(),
        damage: UNFINISHED.to_owned(),
        ..CheckpointEntry::default()
    };
    let newer = CheckpointEntry {
        name: "step-0000000132-gen-000002".to_owned(),
        damage: NewerVersion { found: 99, supported: 1 }.to_string(),
        ..CheckpointEntry::default()
    };
    let entries = [&newer, &complete, &damaged, &unfinished].map(json::ListedCheckpoint::from);
    assert_snapshot!(text(&entries, NOW));
    assert_eq!(text(&[], NOW), "no checkpoints yet");
}
