//! Writes local checkpoints while training continues: copies of the state on each machine's own disk, newer than the
//! checkpoints in the store. If all ranks are lost, training continues from the newest one that a machine still has.
//!
//! They are an extra: what happens to them never ends a job. A rollback does not use them, because its checkpoint decides
//! the weights and must not depend on which machines are left.

use std::{
    fs,
    path::PathBuf,
    sync::{
        Arc,
        mpsc::{self, Receiver, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use baton_checkpoint::{FrozenEntry, Manifest, NewestLocal, SaveId, Store};
use baton_collectives::Collective;
use baton_job::{
    Generation, JobId, Rank,
    message::{RankReport, Restore},
};
use baton_recipe::{Step, progress::Progress};

use crate::{
    Error, Learner, TrainingJob,
    agree::gather,
    saving::{draft, frozen_copies, write_frozen},
    state_copy::StateCopy,
};

/// How long training waits until the local checkpoint that is being written is complete.
pub(crate) const LOCAL_TIMEOUT: Duration = Duration::from_secs(2);

/// Where a machine keeps its local checkpoints.
#[derive(Clone, Debug)]
pub struct LocalFolder {
    /// The folder of this job; each node has a folder in it.
    pub path: PathBuf,
    /// Name of the node.
    pub node: String,
}

impl LocalFolder {
    /// The folder that this node writes to.
    fn of_node(&self) -> PathBuf {
        // A node's name may contain any character, also a slash.
        let encoded = self.node.bytes().map(|byte| match byte {
            b'-' | b'0'..=b'9' | b'A'..=b'Z' | b'a'..=b'z' => char::from(byte).to_string(),
            _ => format!("_{byte:02x}"),
        });
        self.path.join(encoded.collect::<String>())
    }

    /// The node whose folder has this name.
    fn node_of(folder: &str) -> String {
        let mut parts = folder.split('_');
        let mut name = parts.next().unwrap_or_default().as_bytes().to_vec();
        for part in parts {
            let byte = part.get(..2).and_then(|code| u8::from_str_radix(code, 16).ok());
            let (Some(byte), Some(rest)) = (byte, part.get(2..)) else { return folder.to_owned() };
            name.push(byte);
            name.extend_from_slice(rest.as_bytes());
        }
        String::from_utf8(name).unwrap_or_else(|_| folder.to_owned())
    }

    /// The same folder of another job.
    fn of_job(&self, job: JobId) -> PathBuf {
        self.path.with_file_name(job.to_string())
    }

    /// The newest checkpoints of `job` in the folders here, first in this node's own: it may have had another name before, and
    /// several nodes may share a disk.
    fn find(&self, job: JobId, not_before: Generation, found: &mut FoundLocally) {
        let Ok(folders) = fs::read_dir(self.of_job(job)) else { return };
        let own = self.of_node();
        let mut folders: Vec<PathBuf> =
            folders.filter_map(Result::ok).map(|folder| folder.path()).collect();
        folders.sort_by_key(|path| (path.file_name() != own.file_name(), path.clone()));
        for path in folders {
            let node = Self::node_of(&path.file_name().unwrap_or_default().to_string_lossy());
            let opened = Store::open_existing(&path.to_string_lossy());
            let newest = opened.and_then(|store| Ok((store.newest_of(job, not_before)?, store)));
            match newest {
                Ok((NewestLocal { usable, damaged }, store)) => {
                    let damaged = damaged.into_iter();
                    found.damaged.extend(damaged.map(|(id, problem)| (id, node.clone(), problem)));
                    let newest = usable.map(|manifest| FoundCheckpoint { node, manifest, store });
                    found.usable.extend(newest);
                }
                Err(error) => {
                    tracing::warn!("the local checkpoints in {path:?} cannot be read: {error}");
                }
            }
        }
    }
}

/// The local checkpoints that a machine has.
#[derive(Debug, Default)]
pub(crate) struct FoundLocally {
    /// Those that training may continue from.
    pub(crate) usable: Vec<FoundCheckpoint>,
    /// Those that are damaged, with their node and the reason.
    pub(crate) damaged: Vec<(SaveId, String, String)>,
}

/// A complete local checkpoint.
#[derive(Debug)]
pub(crate) struct FoundCheckpoint {
    /// The node that wrote it.
    pub(crate) node: String,
    pub(crate) manifest: Manifest,
    pub(crate) store: Store,
}

/// Writes a rank's part of the local checkpoints of its machine.
#[derive(Debug, Default)]
pub(crate) struct LocalSaver {
    store: Option<Arc<Store>>,
    /// This rank among the ranks of its machine, and their number.
    part: Rank,
    parts: u32,
    spare: StateCopy,
    /// The frozen regions, once this rank has written them.
    frozen: Option<Vec<FrozenEntry>>,
    /// The newest part, written or being written.
    newest: Option<SaveId>,
    active: Option<ActiveSave>,
    has_failed: bool,
}

#[derive(Debug)]
struct ActiveSave {
    step: Step,
    result: Receiver<Written>,
}

/// What the thread returns, and its memory.
type Written = (Result<WrittenPart, String>, StateCopy);

#[derive(Debug)]
struct WrittenPart {
    frozen: Vec<FrozenEntry>,
    /// Whether the checkpoint is complete with it.
    is_last: bool,
    /// Since the copy of the state.
    seconds: f64,
}

impl LocalSaver {
    /// Prepares for a generation. All ranks must call it if the recipe has a folder for local checkpoints.
    pub(crate) fn begin(
        &mut self,
        job: &TrainingJob,
        collective: &mut dyn Collective,
        report: &mut dyn FnMut(RankReport),
    ) -> Result<(), Error> {
        let mine = job.local.as_ref().map(|local| local.node.clone());
        let nodes: Vec<Option<String>> = gather(collective, &mine)?;
        let before = nodes.iter().take(collective.rank().0 as usize);
        let count = |nodes: &mut dyn Iterator<Item = &Option<String>>| {
            u32::try_from(nodes.filter(|node| **node == mine).count()).unwrap_or_default()
        };
        self.part = Rank(count(&mut before.clone()));
        self.parts = count(&mut nodes.iter());
        if self.store.is_none()
            && let Some(local) = &job.local
        {
            match Store::open(&local.of_node().to_string_lossy()) {
                Ok(store) => self.store = Some(Arc::new(store)),
                Err(error) => self.failed(error.to_string(), report),
            }
        }
        Ok(())
    }

    /// The checkpoints of this machine that training may continue from. One rank of each machine has them.
    pub(crate) fn find(&self, job: &TrainingJob, restore: &Restore) -> FoundLocally {
        let mut found = FoundLocally::default();
        let Some(local) = job.local.as_ref().filter(|_| self.part == Rank(0)) else { return found };
        // Those from before a rollback are never used, whether it has invalidated them or not.
        let rollbacks = restore.all_invalidated().map(|rollback| rollback.generation);
        let not_before = rollbacks.fold(restore.not_before, Generation::max);
        for job in restore.continued.iter().chain([&job.id]) {
            local.find(*job, not_before, &mut found);
        }
        found
    }

    /// Copies this rank's part of the state after `progress` and starts to write it.
    pub(crate) fn save<L: Learner>(
        &mut self,
        learner: &mut L,
        (progress, id): (&Progress, SaveId),
        job: &TrainingJob,
        report: &mut dyn FnMut(RankReport),
    ) {
        let Some(store) = self.store.clone().filter(|_| self.newest != Some(id)) else { return };
        self.newest = Some(id);
        // All ranks of a machine must write the same steps, so none is skipped as long as the disk works.
        self.collect(LOCAL_TIMEOUT, report);
        if self.active.is_some() {
            let problem = format!(
                "{} takes more than {} s for a local checkpoint: save less often (checkpoint.local_every_steps) or choose \
                 a faster disk",
                store.location(),
                LOCAL_TIMEOUT.as_secs()
            );
            return self.failed(problem, report);
        }
        let started = Instant::now();
        let mut copy = std::mem::take(&mut self.spare);
        let (part, parts) = (self.part, self.parts);
        let taken = copy.take(learner, part, parts);
        let known = if part == Rank(0) { self.frozen.clone() } else { Some(Vec::new()) };
        let copies = if known.is_none() { frozen_copies(learner) } else { Ok(Vec::new()) };
        let manifest = draft(learner, progress, id, parts, job.id, &job.spec);
        let manifest = Manifest { data: Some(job.inputs.summary().clone()), ..manifest };
        let (sender, result) = mpsc::sync_channel(1);
        let work = move || {
            let write = || {
                taken.map_err(|error| error.to_string())?;
                let copies = copies.map_err(|error| error.to_string())?;
                let snapshot = copy.snapshot().map_err(|error| error.to_string())?;
                let frozen = match known {
                    Some(frozen) => frozen,
                    None => write_frozen(&store, id, copies).map_err(|error| error.to_string())?,
                };
                let manifest = Manifest { frozen: frozen.clone(), ..manifest };
                let is_last = store.write_part(&manifest, part, snapshot);
                let is_last = is_last.map_err(|error| error.to_string())?;
                Ok(WrittenPart { frozen, is_last, seconds: started.elapsed().as_secs_f64() })
            };
            let written = write();
            // The rank may have ended.
            let _ = sender.send((written, copy));
        };
        match thread::Builder::new().name("local-checkpoint".to_owned()).spawn(work) {
            Ok(_) => self.active = Some(ActiveSave { step: id.step, result }),
            Err(error) => {
                self.failed(format!("cannot start the thread that writes it ({error})"), report)
            }
        }
    }

    /// Whether a part is being written.
    pub(crate) fn is_active(&self) -> bool {
        self.active.is_some()
    }

    /// Reports the end of the part that is being written, after waiting for at most `timeout`.
    pub(crate) fn collect(&mut self, timeout: Duration, report: &mut dyn FnMut(RankReport)) {
        let Some(active) = &self.active else { return };
        let step = active.step;
        match active.result.recv_timeout(timeout) {
            Err(RecvTimeoutError::Timeout) => return,
            Err(RecvTimeoutError::Disconnected) => {
                self.failed("the thread that writes it panicked; this is a bug".to_owned(), report);
            }
            Ok((written, copy)) => {
                self.spare = copy;
                match written {
                    Ok(WrittenPart { frozen, is_last, seconds }) => {
                        if !frozen.is_empty() {
                            self.frozen = Some(frozen);
                        }
                        self.has_failed = false;
                        if is_last {
                            report(RankReport::SavedLocally { step, seconds });
                        }
                    }
                    Err(problem) => {
                        // Their files may have been removed.
                        self.frozen = None;
                        self.failed(problem, report);
                    }
                }
            }
        }
        self.active = None;
    }

    /// Removes the machine's local checkpoints, also of the jobs that this one has continued: it is complete. All ranks must call it.
    pub(crate) fn remove(
        &mut self,
        (job, restore): (&TrainingJob, &Restore),
        collective: &mut dyn Collective,
        report: &mut dyn FnMut(RankReport),
    ) {
        self.collect(LOCAL_TIMEOUT, report);
        // A rank that is still writing would leave a file behind.
        let all_wrote = gather(collective, &());
        if let (Ok(_), Some(local), Rank(0)) = (all_wrote, &job.local, self.part) {
            for job in restore.continued.iter().chain([&job.id]) {
                let _ = fs::remove_dir_all(local.of_job(*job));
            }
        }
    }

    /// Reports a failure, unless the save before has failed too.
    fn failed(&mut self, message: String, report: &mut dyn FnMut(RankReport)) {
        if !std::mem::replace(&mut self.has_failed, true) {
            // What a store advises is about its own keys.
            let message = message.replace("checkpoint.dir", "checkpoint.local_dir");
            let message = message.replace(", or lower checkpoint.keep_last", "");
            report(RankReport::LocalSaveFailed { message });
        }
    }
}
