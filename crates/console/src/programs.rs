//! Finds the other programs of Baton, such as `baton-worker`.

use std::{
    env,
    path::{Path, PathBuf},
};

use baton_job::exit::Failure;

use crate::failure::failed;

/// Finds a program in this program's folder, or else on the `PATH`.
pub fn find(name: &str) -> Result<PathBuf, Failure> {
    let mut folders: Vec<PathBuf> = Vec::new();
    folders.extend(env::current_exe().ok().as_deref().and_then(Path::parent).map(Path::to_owned));
    folders.extend(env::split_paths(&env::var_os("PATH").unwrap_or_default()));
    find_in(&folders, name)
}

fn find_in(folders: &[PathBuf], name: &str) -> Result<PathBuf, Failure> {
    let mut candidates = folders.iter().map(|folder| folder.join(name));
    candidates.find(|path| path.is_file()).ok_or_else(|| {
        failed(format!(
            "{name} is neither in this program's folder nor on the PATH: the three programs belong together, \
             and in a checkout `make build` builds them"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_is_named_with_a_remedy() {
        let message = find_in(&["/nowhere".into()], "baton-worker").unwrap_err().message;
        assert!(message.contains("baton-worker") && message.contains("make build"), "{message}");
    }
}
