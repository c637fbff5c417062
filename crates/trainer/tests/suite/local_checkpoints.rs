//! Local checkpoints: training continues from one that is newer than the store's when all ranks were lost, with the bits of
//! an undisturbed run; what happens to them never ends a job.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use baton_checkpoint::Store;
use baton_collectives::Collective;
use baton_data::InputType;
use baton_job::{
    Generation, JobId,
    exit::Outcome,
    message::{RankReport, Restore, Restored, Rollback, StateSource},
};
use baton_recipe::Step;
use baton_trainer::{
    Controls, Error, GenerationContext, JobInputs, LocalFolder, Trainer, TrainingJob,
    linear::LinearLearner,
};
use tempfile::TempDir;

use crate::{kit, local};

const TIMEOUT: Duration = Duration::from_secs(60);

type RunResult = (Result<Outcome, Error>, Vec<RankReport>);

/// The folders of a job that may lose all its ranks.
struct Job {
    folder: TempDir,
    id: JobId,
    /// The node of each rank.
    nodes: Vec<&'static str>,
    /// All nodes have the same disk.
    shares_disk: bool,
    overrides: Vec<String>,
}

impl Job {
    fn new(nodes: &[&'static str]) -> Self {
        let id = JobId("00000000-0000-0000-0000-000000000001".parse().unwrap());
        let folder = tempfile::tempdir().unwrap();
        Self { folder, id, nodes: nodes.to_vec(), shares_disk: false, overrides: Vec::new() }
    }

    /// The job's folder on the disk of a node.
    fn disk(&self, node: &str) -> PathBuf {
        let disk = if self.shares_disk { "shared" } else { node };
        self.folder.path().join(format!("disk-{disk}")).join(self.id.to_string())
    }

    /// The local checkpoints of a node.
    fn of_node(&self, node: &str) -> PathBuf {
        // As in the store of the product: a dot is no letter.
        self.disk(node).join(node.replace('.', "_2e"))
    }

    fn store(&self) -> PathBuf {
        self.folder.path().join("store")
    }

    fn trainer(&self, node: &str) -> Trainer<LinearLearner> {
        let digits = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/digits/digits-val.beton");
        let overrides = [
            "model.arch=linear",
            &format!("data={{ train='{digits}', val='{digits}' }}"),
            "train={ epochs=3, global_batch=88, resolution=8, virtual_ranks=4, log_every=1 }",
            "optimizer={ kind='sgd', momentum=0.9 }",
            "checkpoint={ every_epochs=0, every_steps=4, keep_last=99 }",
            "checkpoint.local_dir=/disk",
            "checkpoint.local_every_steps=3",
        ];
        let more: Vec<&str> = self.overrides.iter().map(String::as_str).collect();
        let spec = Arc::new(kit::recipe(&overrides, &more));
        let inputs = JobInputs::open(&spec, Path::new("")).unwrap();
        let store = Arc::new(Store::open(self.store().to_str().unwrap()).unwrap());
        let local = Some(LocalFolder { path: self.disk(node), node: node.to_owned() });
        let job = TrainingJob { id: self.id, spec: spec.clone(), store, local, inputs };
        Trainer::new(job, Box::new(move || LinearLearner::new(&spec, &InputType::Image))).unwrap()
    }

    /// One generation of new ranks. All are lost once the files exist that `lost` names, after the step before them.
    fn run(
        &self,
        generation: u64,
        restore: &Restore,
        lost: Option<(u64, &[PathBuf])>,
    ) -> Vec<RunResult> {
        self.run_until(generation, restore, lost, None)
    }

    /// The same, with a request to stop when rank 0 has made this step: the next one is the last.
    fn run_until(
        &self,
        generation: u64,
        restore: &Restore,
        lost: Option<(u64, &[PathBuf])>,
        stop: Option<Step>,
    ) -> Vec<RunResult> {
        let controls = &Controls::default();
        let run = |node: &str, mut collective: local::LocalCollective| {
            let (abort, mut reports) = (collective.abort_handle(), Vec::new());
            let ended = self.trainer(node).run(&mut GenerationContext {
                generation: Generation(generation),
                collective: &mut collective,
                restore,
                controls,
                report: &mut |report| {
                    let step = match &report {
                        RankReport::Started { progress, .. } => Some(progress.step),
                        RankReport::Stepped(stepped) => Some(stepped.step),
                        _ => None,
                    };
                    if step.is_some() && step == stop {
                        controls.request_stop("a notice".to_owned());
                    }
                    if let (RankReport::Stepped(stepped), Some((step, files))) = (&report, lost)
                        && stepped.step == Step(step)
                    {
                        wait_for(files);
                        abort.abort();
                    }
                    reports.push(report);
                },
            });
            (ended, reports)
        };
        thread::scope(|scope| {
            let group = local::group(u32::try_from(self.nodes.len()).unwrap(), TIMEOUT);
            let members = self.nodes.iter().zip(group);
            let threads: Vec<_> =
                members.map(|(node, rank)| scope.spawn(move || run(node, rank))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// Trains until a stop after step 4, and again until all ranks are lost at step 7: the store has step 4, each node step 6.
    fn lose_all_ranks(&self) {
        self.stop_after(1, 4);
        let local = |node| self.of_node(node).join("step-0000000006-gen-000002/manifest.json");
        let files: Vec<_> = self.nodes.iter().map(|node| local(node)).collect();
        let ended = self.run(2, &Restore::default(), Some((7, &files)));
        assert!(ended.iter().all(|(ended, _)| ended.as_ref().is_err_and(Error::is_peer_loss)));
    }

    fn stop_after(&self, generation: u64, step: u64) {
        let stop = Some(Step(step - 1));
        let ended = self.run_until(generation, &Restore::default(), None, stop);
        assert!(ended.iter().all(|(ended, _)| matches!(ended, Ok(Outcome::Drained { .. }))));
        assert_eq!(saved_steps(&ended[0].1).last(), Some(&step));
    }

    fn damage(&self, node: &str) {
        damage(&self.of_node(node).join("step-0000000006-gen-000002"));
    }
}

/// Flips a byte in a file of a checkpoint.
fn damage(folder: &Path) {
    let mut files = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
    let shard = files.find(|file| file.extension().unwrap() == "safetensors").unwrap();
    let mut bytes = fs::read(&shard).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(shard, bytes).unwrap();
}

fn wait_for(files: &[PathBuf]) {
    let begin = Instant::now();
    while !files.iter().all(|file| file.exists()) {
        assert!(begin.elapsed() < TIMEOUT, "{files:?}");
        thread::yield_now();
    }
}

/// The digest of the final state.
fn digest(ended: &[RunResult]) -> &str {
    let mut reports = ended.iter().flat_map(|(_, reports)| reports);
    let digest = reports.find_map(|report| match report {
        RankReport::Done { outcome: Outcome::Completed, digest } => Some(digest),
        _ => None,
    });
    digest.unwrap_or_else(|| panic!("{ended:?}"))
}

fn undisturbed() -> String {
    digest(&Job::new(&["a", "b"]).run(1, &Restore::default(), None)).to_owned()
}

/// Where rank 0 began: the step, and the checkpoint if there was one.
fn began(ended: &[RunResult]) -> (u64, Option<&Restored>) {
    let started = ended[0].1.iter().find_map(|report| match report {
        RankReport::Started { source: StateSource::Checkpoint(restored), progress } => {
            Some((progress.step.0, Some(restored)))
        }
        RankReport::Started { progress, .. } => Some((progress.step.0, None)),
        _ => None,
    });
    started.unwrap_or_else(|| panic!("{ended:?}"))
}

fn saved_steps(reports: &[RankReport]) -> Vec<u64> {
    let steps = reports.iter().filter_map(|report| match report {
        RankReport::Saved(commit) => Some(commit.step.0),
        _ => None,
    });
    steps.collect()
}

#[test]
fn training_continues_from_a_local_checkpoint_that_is_newer_than_the_store_with_the_same_bits() {
    // The ranks of one machine; of two; and of two of which one does not come back.
    for (nodes, later, holder) in [
        (&["a", "a"][..], &["a"][..], "a"),
        (&["a", "b"], &["b", "a"], "b"),
        (&["a", "a", "b"], &["c", "b"], "b"),
    ] {
        let mut job = Job::new(nodes);
        job.lose_all_ranks();
        job.nodes = later.to_vec();
        let ended = job.run(3, &Restore::default(), None);
        let (step, restored) = began(&ended);
        assert_eq!(step, 6, "{nodes:?}");
        assert_eq!(restored.unwrap().local_of.as_deref(), Some(holder), "{nodes:?}");
        assert_eq!(digest(&ended), undisturbed(), "{nodes:?}");
        // The store gets the state at once.
        assert_eq!(saved_steps(&ended[0].1)[0], 6, "{nodes:?}");
        for node in later {
            assert!(!job.disk(node).exists(), "{node} keeps nothing of a complete job");
        }
    }
}

#[test]
fn the_state_of_a_machine_is_used_although_the_store_has_lost_what_the_job_has_saved() {
    let job = Job::new(&["a", "b"]);
    job.lose_all_ranks();
    fs::remove_dir_all(job.store()).unwrap();
    let saved =
        |step| Restore { last_saved: Some((Generation(1), Step(step))), ..Restore::default() };
    // One that is older than what the store had would lose steps.
    let refused = job.run(3, &saved(8), None);
    let error = refused[0].0.as_ref().unwrap_err().to_string();
    assert!(error.contains("has no checkpoint, but this job has saved step-0000000008"), "{error}");

    let ended = job.run(4, &saved(4), None);
    let (step, restored) = began(&ended);
    let restored = restored.unwrap();
    assert_eq!((step, restored.local_of.as_deref()), (6, Some("a")));
    let [gone] = &restored.skipped[..] else { panic!("{restored:?}") };
    assert!(gone.starts_with("step-0000000004-gen-000001 (the job has saved it, but"), "{gone}");
    assert_eq!(digest(&ended), undisturbed());
    assert_eq!(saved_steps(&ended[0].1)[0], 6, "the store gets the state at once");
}

#[test]
fn a_machine_finds_what_it_wrote_under_another_name() {
    let mut job = Job::new(&["a"]);
    job.lose_all_ranks();
    fs::rename(job.disk("a").parent().unwrap(), job.disk("x").parent().unwrap()).unwrap();
    job.nodes = vec!["x"];
    let ended = job.run(3, &Restore::default(), None);
    let (step, restored) = began(&ended);
    assert_eq!((step, restored.unwrap().local_of.as_deref()), (6, Some("a")));
    assert_eq!(digest(&ended), undisturbed());
    assert!(!job.disk("x").exists());
}

#[test]
fn a_damaged_local_checkpoint_is_skipped_for_that_of_another_node_and_then_for_the_store() {
    let job = Job::new(&["a", "b"]);
    job.lose_all_ranks();
    job.damage("a");
    let ended = job.run(3, &Restore::default(), Some((7, &[])));
    let (step, restored) = began(&ended);
    assert_eq!((step, restored.unwrap().local_of.as_deref()), (6, Some("b")));
    let [skipped] = &restored.unwrap().skipped[..] else { panic!("{restored:?}") };
    assert!(skipped.starts_with("step-0000000006-gen-000002 of node a ("), "{skipped}");

    let job = Job::new(&["a", "b"]);
    job.lose_all_ranks();
    job.damage("a");
    job.damage("b");
    let ended = job.run(3, &Restore::default(), None);
    let (step, restored) = began(&ended);
    assert_eq!((step, restored.unwrap().local_of.as_deref()), (4, None));
    assert_eq!(restored.unwrap().skipped.len(), 2, "{restored:?}");
    assert_eq!(digest(&ended), undisturbed());
}

#[test]
fn nodes_that_share_a_disk_use_the_copy_of_either() {
    for damaged in ["a.b", "b"] {
        let mut job = Job::new(&["a.b", "b"]);
        job.shares_disk = true;
        job.lose_all_ranks();
        job.damage(damaged);
        let ended = job.run(3, &Restore::default(), None);
        let (step, restored) = began(&ended);
        let other = if damaged == "b" { "a.b" } else { "b" };
        assert_eq!((step, restored.unwrap().local_of.as_deref()), (6, Some(other)));
        assert!(
            restored.unwrap().skipped.iter().all(|text| text.contains(&format!("node {damaged} ")))
        );
        assert_eq!(digest(&ended), undisturbed());
    }
}

/// A job whose store is empty until its end: all ranks are lost with local checkpoints after step 6.
fn lost_before_the_first_save(nodes: &[&'static str]) -> (Job, String) {
    let mut job = Job::new(nodes);
    job.overrides.push("checkpoint.every_steps=0".to_owned());
    let undisturbed = digest(&job.run(1, &Restore::default(), None)).to_owned();
    fs::remove_dir_all(job.store()).unwrap();
    let files: Vec<_> = nodes
        .iter()
        .map(|node| job.of_node(node).join("step-0000000006-gen-000001/manifest.json"))
        .collect();
    let ended = job.run(1, &Restore::default(), Some((7, &files)));
    assert!(ended.iter().all(|(ended, _)| ended.as_ref().is_err_and(Error::is_peer_loss)));
    // The last save may not have come to the removal of those before it.
    for node in nodes {
        let _ = fs::remove_dir_all(job.of_node(node).join("step-0000000003-gen-000001"));
    }
    (job, undisturbed)
}

#[test]
fn training_begins_anew_without_a_trace_of_damaged_local_checkpoints_and_says_so() {
    let flip = |folder: &Path| damage(folder);
    let cut = |folder: &Path| {
        let shard = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
        let shard = shard.filter(|file| file.extension().unwrap() == "safetensors").min().unwrap();
        fs::File::options().write(true).open(shard).unwrap().set_len(100).unwrap();
    };
    for (nodes, harm) in [
        (&["a"][..], &flip as &dyn Fn(&Path)),
        (&["a", "b"], &flip),
        (&["a", "a"], &flip),
        (&["a", "b"], &cut),
    ] {
        let (job, undisturbed) = lost_before_the_first_save(nodes);
        let mut disks = nodes.to_vec();
        disks.dedup();
        for node in &disks {
            harm(&job.of_node(node).join("step-0000000006-gen-000001"));
        }
        let ended = job.run(2, &Restore::default(), None);
        let fresh = ended[0].1.iter().find_map(|report| match report {
            RankReport::Started { source: StateSource::Fresh { skipped }, .. } => Some(skipped),
            _ => None,
        });
        let skipped = fresh.unwrap_or_else(|| panic!("{ended:?}"));
        assert_eq!(skipped.len(), disks.len(), "{skipped:?}");
        assert!(skipped[0].starts_with("step-0000000006-gen-000001 of node a ("), "{skipped:?}");
        assert_eq!(digest(&ended), undisturbed, "{nodes:?}");
    }
}

#[test]
fn a_local_checkpoint_of_another_recipe_is_refused_or_used_if_the_user_allows_it() {
    let (mut job, _) = lost_before_the_first_save(&["a", "b"]);
    job.overrides.push("schedule.lr=0.01".to_owned());
    let ended = job.run(2, &Restore::default(), None);
    let Err(error) = &ended[0].0 else { panic!("{ended:?}") };
    let text = error.to_string();
    assert!(text.contains("of node a was written by another recipe (schedule"), "{text}");

    let before = job.id;
    let disks = ["a", "b"].map(|node| job.disk(node));
    job.id = JobId("00000000-0000-0000-0000-000000000002".parse().unwrap());
    let restore =
        Restore { allow_recipe_change: true, continued: vec![before], ..Restore::default() };
    let ended = job.run(3, &restore, None);
    let (step, restored) = began(&ended);
    let restored = restored.unwrap();
    assert_eq!((step, restored.local_of.as_deref()), (6, Some("a")));
    assert!(restored.changes[0].starts_with("schedule"), "{restored:?}");
    assert!(matches!(ended[0].0, Ok(Outcome::Completed)));
    assert!(disks.iter().all(|disk| !disk.exists()), "of a job that was continued");
}

#[test]
fn a_local_checkpoint_is_used_in_place_of_a_damaged_one_in_the_store() {
    let job = Job::new(&["a", "b"]);
    job.stop_after(1, 4);
    damage(&job.store().join("step-0000000004-gen-000001"));
    let ended = job.run(2, &Restore::default(), None);
    let (step, restored) = began(&ended);
    assert_eq!((step, restored.unwrap().local_of.as_deref()), (4, Some("a")));
    let [skipped] = &restored.unwrap().skipped[..] else { panic!("{restored:?}") };
    assert!(skipped.starts_with("step-0000000004-gen-000001 ("), "{skipped}");
    assert_eq!(digest(&ended), undisturbed());
}

#[test]
fn the_state_is_that_of_the_store_if_its_newest_and_the_local_ones_after_the_next_are_damaged() {
    for nodes in [&["a"][..], &["a", "b"]] {
        let job = Job::new(nodes);
        job.stop_after(1, 4);
        // Store and machines have step 8; the store also step 4.
        job.stop_after(2, 8);
        let local = |node| job.of_node(node).join("step-0000000008-gen-000002");
        nodes.iter().for_each(|node| damage(&local(node)));
        damage(&job.store().join("step-0000000008-gen-000002"));
        let ended = job.run(3, &Restore::default(), None);
        let (step, restored) = began(&ended);
        assert_eq!((step, restored.unwrap().local_of.as_deref()), (4, None), "{nodes:?}");
        assert_eq!(restored.unwrap().skipped.len(), 1 + nodes.len(), "{restored:?}");
        assert_eq!(digest(&ended), undisturbed(), "{nodes:?}");
    }
}

#[test]
fn parts_of_local_checkpoints_that_are_never_complete_do_not_fill_the_disk() {
    let mut job = Job::new(&["a", "a"]);
    job.overrides.push("checkpoint.every_steps=0".to_owned());
    let steps = [3, 6, 9];
    let of_step = |step| job.of_node("a").join(format!("step-{step:010}-gen-000001"));
    for step in steps {
        // With a folder in its place, the second rank cannot write its file.
        fs::create_dir_all(of_step(step).join("shard-00001-of-00002.safetensors")).unwrap();
    }
    let first_rank = |step| of_step(step).join("shard-00000-of-00002.safetensors");
    let ended = job.run(1, &Restore::default(), Some((10, &[first_rank(9)])));
    assert!(ended.iter().all(|(ended, _)| ended.as_ref().is_err_and(Error::is_peer_loss)));
    let left = steps.map(|step| first_rank(step).exists());
    assert_eq!(left, [false, true, true], "{ended:?}");
}

#[test]
fn a_local_checkpoint_is_not_used_if_the_store_has_a_newer_one_or_it_is_of_another_job() {
    let job = Job::new(&["a", "b"]);
    job.stop_after(1, 4);
    let disks = ["a", "b"].map(|node| job.disk(node));
    let away = |disk: &PathBuf| disk.with_extension("away");
    disks.iter().for_each(|disk| fs::rename(disk, away(disk)).unwrap());
    job.stop_after(2, 8);
    for disk in &disks {
        fs::remove_dir_all(disk).unwrap();
        fs::rename(away(disk), disk).unwrap();
    }
    let ended = job.run(3, &Restore::default(), None);
    let (step, restored) = began(&ended);
    assert_eq!((step, restored.unwrap().local_of.as_deref()), (8, None));
    assert_eq!(digest(&ended), undisturbed());

    let mut job = Job::new(&["a", "b"]);
    job.lose_all_ranks();
    let own = ["a", "b"].map(|node| job.disk(node));
    job.id = JobId("00000000-0000-0000-0000-000000000002".parse().unwrap());
    for (node, own) in ["a", "b"].iter().zip(own) {
        fs::rename(own, job.disk(node)).unwrap();
    }
    let ended = job.run(3, &Restore::default(), Some((5, &[])));
    assert_eq!(began(&ended).0, 4);
}

#[test]
fn a_rollback_never_uses_a_local_checkpoint() {
    for before in [5, 7] {
        let job = Job::new(&["a", "b"]);
        job.lose_all_ranks();
        let rollback = Rollback {
            generation: Generation(3),
            before: Step(before),
            suspect_from: None,
            skip: None,
        };
        let restore = Restore { rollbacks: vec![rollback], ..Restore::default() };
        let ended = job.run(3, &restore, None);
        assert_eq!(began(&ended).0, 4, "before step {before}");
    }
}

#[test]
fn a_stop_has_its_state_on_the_machines_too() {
    let job = Job::new(&["a", "b"]);
    let ended = job.run_until(1, &Restore::default(), None, Some(Step(1)));
    for (ended, reports) in &ended {
        assert!(matches!(ended, Ok(Outcome::Drained { .. })), "{ended:?}");
        let is_local = |report: &RankReport| matches!(report, RankReport::SavedLocally { .. });
        assert!(reports.iter().any(is_local), "{reports:?}");
    }
    assert!(job.of_node("a").join("step-0000000002-gen-000001/manifest.json").exists());
}

#[test]
fn a_folder_that_cannot_be_written_is_reported_once_and_training_goes_on() {
    let job = Job::new(&["a", "b"]);
    fs::create_dir_all(job.of_node("a").parent().unwrap()).unwrap();
    fs::write(job.of_node("a"), "not a folder").unwrap();
    let ended = job.run(1, &Restore::default(), None);
    assert_eq!(digest(&ended), undisturbed());
    let failures = |reports: &[RankReport]| {
        reports.iter().filter(|report| matches!(report, RankReport::LocalSaveFailed { .. })).count()
    };
    assert_eq!((failures(&ended[0].1), failures(&ended[1].1)), (1, 0), "{:?}", ended[0].1);
    let message = ended[0].1.iter().find_map(|report| match report {
        RankReport::LocalSaveFailed { message } => Some(message),
        _ => None,
    });
    assert!(message.unwrap().ends_with("set checkpoint.local_dir to a folder"), "{message:?}");
}
