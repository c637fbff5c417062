//! Errors of the disk. A full disk is no bad input: the same command continues the job once there is space.

use std::{fmt::Display, io, path::Path};

use baton_checkpoint::Error as StoreError;
use baton_job::exit::{Failure, bad_input, crash};
use rustix::io::Errno;

/// The failure if a problem with `path` is that its disk is full.
pub(crate) fn full(path: &Path, problem: &str) -> Option<Failure> {
    let path = path.display();
    is_full(problem).then(|| {
        crash(format!("{problem}; free space on the disk of {path} and start the job again"))
    })
}

/// The failure for a problem with `path`: another try helps only if its disk was full.
pub(crate) fn failure(path: &Path, problem: impl Display) -> Failure {
    let problem = problem.to_string();
    full(path, &problem).unwrap_or_else(|| bad_input(problem))
}

/// The failure for a checkpoint store that cannot be used.
pub(crate) fn store_failure(error: &StoreError) -> Failure {
    match error {
        StoreError::Location { location, problem } if is_full(problem) => {
            failure(Path::new(location), format!("checkpoint store {location}: {problem}"))
        }
        error => failure(Path::new("the checkpoint store"), error),
    }
}

/// Whether an error's text is that of a full disk or quota. Errors of libraries keep only the system's text.
fn is_full(problem: &str) -> bool {
    [Errno::NOSPC, Errno::DQUOT]
        .iter()
        .any(|full| problem.contains(&io::Error::from(*full).to_string()))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use baton_job::exit::Outcome;

    use super::*;

    fn exit_code(failure: &Failure) -> u8 {
        Outcome::Failed { failure: failure.clone() }.exit_code()
    }

    #[test]
    fn a_full_disk_is_retriable_and_names_what_to_free() {
        // This device is always full.
        let full = fs::write("/dev/full", "text").unwrap_err().to_string();
        let store =
            StoreError::Location { location: "/run/ckpt".to_owned(), problem: full.clone() };

        for (failed, place) in [
            (store_failure(&store), "/run/ckpt"),
            (failure(Path::new("/run/journal.redb"), full), "/run/journal.redb"),
        ] {
            assert_eq!(exit_code(&failed), baton_job::exit::FAILED, "{failed}");
            let remedy = format!("free space on the disk of {place} and start the job again");
            assert!(failed.message.ends_with(&remedy), "{failed}");
            assert!(!failed.message.contains("writable"), "{failed}");
        }
    }

    #[test]
    fn a_folder_that_cannot_be_created_is_bad_input() {
        let missing = fs::write("/nowhere/file", "text").unwrap_err().to_string();
        let store = StoreError::Location { location: "/nowhere".to_owned(), problem: missing };
        let failed = store_failure(&store);
        assert_eq!(exit_code(&failed), baton_job::exit::BAD_INPUT, "{failed}");
        assert!(failed.message.contains("set checkpoint.dir to a writable folder"), "{failed}");
    }
}
