//! Predictions for single samples, as lines of a CSV file.

use std::{
    fs::File,
    io::{self, ErrorKind, Read},
    path::Path,
};

use baton_console::output::refuse_special_file;
use baton_job::exit::{Failure, bad_input};
use baton_recipe::{JobSpec, spec::LossKind};

/// The prediction for a sample of a classification.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Prediction {
    pub(crate) class: usize,
    pub(crate) probability: f32,
}

/// What is known about a sample.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Known<'a> {
    Nothing,
    Class(i64),
    Values(&'a [f32]),
}

/// First column of every file of predictions.
const FIRST_COLUMN: &str = "sample";

/// Refuses to replace anything but a file of predictions: an option may name a wrong file, such as the weights or a table of
/// the samples.
pub(crate) fn refuse_other_file(target: &Path) -> Result<(), Failure> {
    refuse_special_file(target)?;
    if target.parent().is_some_and(|folder| folder != Path::new("") && !folder.is_dir()) {
        return Err(bad_input(format!(
            "{} would be in a folder that does not exist: create it first, or give another path",
            target.display()
        )));
    }
    match File::open(target).and_then(holds_predictions) {
        Ok(true) => Ok(()),
        Ok(false) => Err(bad_input(format!(
            "{} exists and holds no predictions: remove it, or give another path",
            target.display()
        ))),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(bad_input(format!("{}: {error}; give another path", target.display()))),
    }
}

/// Bytes of a file that are looked at: the names of 100,000 columns and more.
const MAX_LOOK_BYTES: u64 = 1 << 20;

/// Whether the beginning of a text is that of predictions, as this program writes them. One that was only created is, too.
fn holds_predictions(text: impl Read) -> io::Result<bool> {
    let mut start = Vec::new();
    text.take(MAX_LOOK_BYTES).read_to_end(&mut start)?;
    if start.len() as u64 == MAX_LOOK_BYTES {
        // The last line may be cut.
        let Some(end) = start.iter().rposition(|byte| *byte == b'\n') else { return Ok(false) };
        start.truncate(end);
    }
    let Ok(start) = std::str::from_utf8(&start) else { return Ok(false) };
    let mut lines = start.lines();
    let Some(names) = lines.next() else { return Ok(start.is_empty()) };
    let columns = names.split(',').count();
    let is_prediction = |line: &str| {
        let mut values = line.split(',');
        let sample = values.next().is_some_and(|sample| sample.parse::<u64>().is_ok());
        sample
            && values.all(|value| value.parse::<f64>().is_ok())
            && line.split(',').count() == columns
    };
    Ok(is_header(names.split(',')) && lines.all(is_prediction))
}

/// Whether these are the names that [`PredictionColumns::header`] gives.
fn is_header<'a>(names: impl Iterator<Item = &'a str>) -> bool {
    let names: Vec<&str> = names.collect();
    let numbered = |name: &str, names: &[&str]| match names {
        [one] => *one == name,
        names => {
            names.iter().enumerate().all(|(number, other)| *other == format!("{name}{number}"))
        }
    };
    match &names[..] {
        [FIRST_COLUMN, "label", "prediction", "probability", all @ ..]
        | [FIRST_COLUMN, "prediction", "probability", all @ ..] => {
            all.is_empty() || numbered("p", all)
        }
        [FIRST_COLUMN, values @ ..] if !values.is_empty() => {
            let (targets, predictions) = values.split_at(values.len() / 2);
            numbered("prediction", values)
                || (numbered("target", targets) && numbered("prediction", predictions))
        }
        _ => false,
    }
}

/// What the outputs of a network are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OutputKind {
    /// Logits of classes that exclude each other.
    Exclusive,
    /// Logits of classes, each by itself.
    Independent,
    /// The values of a regression.
    Values,
}

/// The columns of a file of predictions.
#[derive(Clone, Debug)]
pub(crate) struct PredictionColumns {
    /// Number of classes, or of values of a regression.
    pub(crate) outputs: usize,
    kind: OutputKind,
    /// Whether the probabilities of all classes are columns.
    has_probabilities: bool,
    /// Whether the labels are known.
    has_labels: bool,
}

impl PredictionColumns {
    /// Those for a recipe's network; `None` if it predicts neither classes nor values.
    pub(crate) fn of_recipe(
        spec: &JobSpec,
        has_labels: bool,
        has_probabilities: bool,
    ) -> Option<Self> {
        let kind = match spec.loss.kind {
            LossKind::CrossEntropy => OutputKind::Exclusive,
            LossKind::BinaryCrossEntropy => OutputKind::Independent,
            kind if kind.predicts_values() => OutputKind::Values,
            _ => return None,
        };
        let outputs = spec.model.num_classes as usize;
        Some(Self { outputs, kind, has_probabilities, has_labels })
    }

    pub(crate) fn is_classification(&self) -> bool {
        self.kind != OutputKind::Values
    }

    /// The probabilities of the classes from the outputs for a sample; empty for a regression.
    pub(crate) fn probabilities(&self, outputs: &[f32]) -> Vec<f32> {
        match self.kind {
            OutputKind::Exclusive => softmax(outputs),
            OutputKind::Independent => sigmoid(outputs),
            OutputKind::Values => Vec::new(),
        }
    }

    /// The names of the columns, divided by commas.
    pub(crate) fn header(&self) -> String {
        let numbered = |name: &str| match self.outputs {
            1 => vec![name.to_owned()],
            outputs => (0..outputs).map(|output| format!("{name}{output}")).collect(),
        };
        let mut names = vec![FIRST_COLUMN.to_owned()];
        if self.is_classification() {
            names.extend(self.has_labels.then(|| "label".to_owned()));
            names.extend(["prediction".to_owned(), "probability".to_owned()]);
            if self.has_probabilities {
                names.extend(numbered("p"));
            }
        } else {
            if self.has_labels {
                names.extend(numbered("target"));
            }
            names.extend(numbered("prediction"));
        }
        names.join(",")
    }

    /// The line of a sample, without its end.
    pub(crate) fn line(&self, sample: u64, known: Known<'_>, outputs: &[f32]) -> String {
        let mut line = sample.to_string();
        let mut add = |value: &dyn std::fmt::Display| line += &format!(",{value}");
        match known {
            Known::Nothing => {}
            Known::Class(label) => add(&label),
            Known::Values(values) => values.iter().for_each(|value| add(value)),
        }
        if !self.is_classification() {
            outputs.iter().for_each(|value| add(value));
            return line;
        }
        let probabilities = self.probabilities(outputs);
        let Prediction { class, probability } = prediction(&probabilities);
        add(&class);
        add(&probability);
        if self.has_probabilities {
            probabilities.iter().for_each(|value| add(value));
        }
        line
    }
}

/// The probability of each class by itself; they need not add up to 1.
fn sigmoid(outputs: &[f32]) -> Vec<f32> {
    outputs.iter().map(|output| (1.0 / (1.0 + f64::from(-output).exp())) as f32).collect()
}

/// The probabilities of classes that exclude each other.
fn softmax(outputs: &[f32]) -> Vec<f32> {
    let largest = outputs.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let powers: Vec<f64> = outputs.iter().map(|output| f64::from(output - largest).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.iter().map(|power| (power / sum) as f32).collect()
}

/// The most probable class, the first of equal ones.
pub(crate) fn prediction(probabilities: &[f32]) -> Prediction {
    let best = |best: Prediction, (class, &probability): (usize, &f32)| {
        if probability > best.probability { Prediction { class, probability } } else { best }
    };
    let first = Prediction { class: 0, probability: f32::NEG_INFINITY };
    probabilities.iter().enumerate().fold(first, best)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn columns(outputs: usize, is_classification: bool, has_labels: bool) -> PredictionColumns {
        PredictionColumns {
            outputs,
            kind: if is_classification { OutputKind::Exclusive } else { OutputKind::Values },
            has_probabilities: outputs == 2,
            has_labels,
        }
    }

    #[test]
    fn probabilities_sum_to_one_however_large_the_outputs_are() {
        let found = softmax(&[1_000.0, 1_000.0, -1_000.0]);
        assert_eq!(found, [0.5, 0.5, 0.0]);
        assert_eq!(prediction(&found), Prediction { class: 0, probability: 0.5 });
    }

    #[test]
    fn independent_probabilities_are_not_compared_with_each_other() {
        assert_eq!(sigmoid(&[0.0, 0.0, -1_000.0, 1_000.0]), [0.5, 0.5, 0.0, 1.0]);
    }

    #[test]
    fn only_predictions_are_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("p.csv");
        let refusal = |text: &str| {
            std::fs::write(&path, text).unwrap();
            refuse_other_file(&path).err().map(|failure| failure.message)
        };
        assert_eq!(refusal(""), None);
        let labels = [1.0, 2.0, 3.0];
        for (outputs, is_classification, has_labels) in [
            (3, true, true),
            (3, true, false),
            (2, true, true),
            (2, true, false),
            (1, false, true),
            (1, false, false),
            (3, false, true),
            (3, false, false),
        ] {
            let columns = columns(outputs, is_classification, has_labels);
            let known = match (has_labels, is_classification) {
                (false, _) => Known::Nothing,
                (true, true) => Known::Class(1),
                (true, false) => Known::Values(&labels[..outputs]),
            };
            let line = columns.line(7, known, &[f32::NAN, -1.5e-9, 0.0][..outputs]);
            assert_eq!(refusal(&columns.header()), None);
            assert_eq!(refusal(&format!("{}\n{line}\n{line}\n", columns.header())), None);
            let comment = format!("{}\n{line}\n{line},good\n", columns.header());
            assert!(refusal(&comment).is_some(), "{comment}");
        }
        for other in [
            "name = \"digits\"\n",
            "samples",
            "x",
            "sample",
            "sample,weight,name\n1,2,blood\n",
            "sample,label\n0,1\n",
            "sample,target\n0,1\n",
            "sample,target,age\n0,1,2\n",
            "sample,prediction,age\n0,1,2\n",
            "sample,prediction,probability,comment\n",
            "sample,prediction\n0,benign\n",
            "sample,prediction\nAnna,1\n",
            "sample,prediction\n0,1,2\n",
            "sample,prediction\n0\n",
            "sample,prediction0,prediction2\n",
        ] {
            assert!(
                refusal(other).is_some_and(|text| text.contains("holds no predictions")),
                "{other}"
            );
        }
        // Larger than what is looked at, with and without lines.
        let zeros = "\0".repeat(2 << 20);
        let lines = "7,1,0.5\n".repeat(200_000);
        for other in [zeros.clone(), zeros + "\n", lines.clone()] {
            assert!(refusal(&other).is_some(), "{} bytes", other.len());
        }
        assert_eq!(refusal(&format!("sample,prediction,probability\n{lines}")), None);
        std::fs::remove_file(&path).unwrap();
        assert!(refuse_other_file(&path).is_ok());
        let missing = refuse_other_file(&folder.path().join("no/p.csv")).unwrap_err().message;
        assert!(missing.contains("a folder that does not exist"), "{missing}");
    }

    #[test]
    fn a_line_has_a_value_for_every_column() {
        let cases = [
            (
                columns(3, true, true),
                Known::Class(2),
                "sample,label,prediction,probability",
                "7,2,0,0.5",
            ),
            (columns(3, true, false), Known::Nothing, "sample,prediction,probability", "7,0,0.5"),
        ];
        for (columns, known, header, line) in cases {
            assert_eq!(columns.header(), header);
            assert_eq!(columns.line(7, known, &[5.0, 5.0, -1_000.0]), line);
        }
        let both = columns(2, true, false);
        assert_eq!(both.header(), "sample,prediction,probability,p0,p1");
        assert_eq!(both.line(1, Known::Nothing, &[-1_000.0, 0.0]), "1,1,1,0,1");
        let values = columns(2, false, true);
        assert_eq!(values.header(), "sample,target0,target1,prediction0,prediction1");
        assert_eq!(values.line(0, Known::Values(&[1.0, 2.0]), &[0.5, -1.5]), "0,1,2,0.5,-1.5");
        let one = columns(1, false, false);
        assert_eq!(
            (one.header().as_str(), one.line(3, Known::Nothing, &[0.25]).as_str()),
            ("sample,prediction", "3,0.25")
        );
    }
}
