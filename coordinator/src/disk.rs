//! Errors of the disk. A full disk is no bad input: the same command continues the job once there is space.

use std::{fmt::Display, path::Path};

use baton_checkpoint::{Error as StoreError, is_full_disk};
use baton_job::exit::{Failure, bad_input, crash};

/// The failure if a problem with `path` is that its disk is full.
pub(crate) fn full(path: &Path, problem: &str) -> Option<Failure> {
    let path = path.display();
    is_full_disk(problem).then(|| {
        crash(format!("{problem}; free space on the disk of {path} and start the job again"))
    })
}

/// The failure for a problem with `path`: another try helps only if its disk was full.
pub(crate) fn failure(path: &Path, problem: impl Display) -> Failure {
    let problem = problem.to_string();
    full(path, &problem).unwrap_or_else(|| bad_input(problem))
}

/// The failure for a checkpoint store that cannot be used. Another try helps if a bucket does not respond.
pub(crate) fn store_failure(error: &StoreError) -> Failure {
    match error {
        StoreError::Location { location, problem, .. } if is_full_disk(problem) => {
            failure(Path::new(location), format!("checkpoint store {location}: {problem}"))
        }
        error if error.is_bad_input() => bad_input(error),
        error => crash(error),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use baton_job::exit::Outcome;

    use super::*;

    fn unusable(location: &str, problem: &str) -> StoreError {
        StoreError::Location {
            location: location.to_owned(),
            problem: problem.to_owned(),
            remedy: "set checkpoint.dir to another folder",
        }
    }

    fn exit_code(failure: &Failure) -> u8 {
        Outcome::Failed { failure: failure.clone() }.exit_code()
    }

    #[test]
    fn a_full_disk_is_retriable_and_names_what_to_free() {
        // This device is always full.
        let full = fs::write("/dev/full", "text").unwrap_err().to_string();
        let store = unusable("/run/ckpt", &full);

        for (failed, place) in [
            (store_failure(&store), "/run/ckpt"),
            (failure(Path::new("/run/journal.redb"), full), "/run/journal.redb"),
        ] {
            assert_eq!(exit_code(&failed), baton_job::exit::FAILED, "{failed}");
            let remedy = format!("free space on the disk of {place} and start the job again");
            assert!(failed.message.ends_with(&remedy), "{failed}");
            assert!(!failed.message.contains("checkpoint.dir"), "{failed}");
        }
    }

    #[test]
    fn a_folder_that_cannot_be_created_is_bad_input() {
        let missing = fs::write("/nowhere/file", "text").unwrap_err().to_string();
        let failed = store_failure(&unusable("/nowhere", &missing));
        assert_eq!(exit_code(&failed), baton_job::exit::BAD_INPUT, "{failed}");
        assert!(failed.message.ends_with("; set checkpoint.dir to another folder"), "{failed}");
    }
}
