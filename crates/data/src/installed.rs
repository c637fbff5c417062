//! Files that come with the programs: recipes, and the digits of a first try.

use std::{
    env,
    path::{Path, PathBuf},
};

/// The file or folder at a relative path that a wheel or package has installed beside the folder of this program:
/// `recipes/digits_cpu.toml`, `assets/digits`. `None` if there is none, as in a checkout.
#[must_use]
pub fn installed(path: &Path) -> Option<PathBuf> {
    beside(&env::current_exe().ok()?, path)
}

fn beside(program: &Path, path: &Path) -> Option<PathBuf> {
    let found = program.parent()?.parent()?.join(path);
    (path.is_relative() && found.exists()).then_some(found)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn only_relative_paths_of_files_that_came_with_the_programs_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("assets/digits/train.beton");
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, "").unwrap();
        let find = |path: &str| beside(&folder.path().join("bin/baton-worker"), Path::new(path));
        assert_eq!(find("assets/digits/train.beton").as_ref(), Some(&file));
        assert_eq!(find("assets/digits").as_deref(), file.parent());
        assert_eq!(find("assets/digits/val.beton"), None);
        assert_eq!(find(&file.display().to_string()), None);
    }
}
