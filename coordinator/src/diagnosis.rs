//! Writes each diagnosis to the run folder: Markdown for people, JSON for programs.

use std::{fs, path::Path};

use anyhow::{Context, Result};
use baton_job::engine::WrittenDiagnosis;

/// Writes `diagnosis-N.md` and `diagnosis-N.json`; replaces files of these names from an earlier run in
/// the same folder.
pub(crate) fn write(run_dir: &Path, written: &WrittenDiagnosis) -> Result<()> {
    let name = written.name();
    for (file, text) in
        [(format!("{name}.md"), written.to_markdown()), (format!("{name}.json"), written.to_json())]
    {
        let path = run_dir.join(file);
        fs::write(&path, text).with_context(|| format!("{}: cannot be written", path.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use baton_job::{Generation, JobId};
    use baton_recipe::{
        Step,
        guard::{BatchMark, Diagnosis, Divergence},
    };

    use super::*;

    fn written() -> WrittenDiagnosis {
        let diagnosis = Diagnosis {
            divergence: Divergence::LossNotFinite,
            step: Step(40),
            batch: BatchMark::default(),
            lr: 0.1,
            loss: None,
            gradient_norm: None,
            samples: vec![],
            evaluated: None,
        };
        WrittenDiagnosis {
            number: 2,
            job: JobId(uuid::Uuid::nil()),
            recipe: "demo".to_owned(),
            generation: Generation(1),
            summary: diagnosis.to_string(),
            diagnosis,
            remedy: "the job ended".to_owned(),
            rollback: None,
            advice: vec!["set train.clip_grad_norm = 1.0".to_owned()],
            latest: None,
        }
    }

    #[test]
    fn both_files_are_written_to_the_run_folder() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &written()).unwrap();
        let text = fs::read_to_string(folder.path().join("diagnosis-2.md")).unwrap();
        assert!(text.contains("1. set train.clip_grad_norm = 1.0"), "{text}");
        let json = fs::read(folder.path().join("diagnosis-2.json")).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
        assert_eq!(json["diagnosis"]["step"], 40);
    }

    #[test]
    fn the_error_names_a_folder_that_cannot_be_written() {
        let error = write(Path::new("/nowhere"), &written()).unwrap_err();
        assert!(format!("{error:#}").contains("/nowhere/diagnosis-2.md"), "{error:#}");
    }
}
