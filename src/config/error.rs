//! What is wrong with a configuration, where, and what to write instead.

use std::fmt;
use std::path::{Path, PathBuf};

/// Everything that is wrong with one configuration. Holds at least one problem and never a secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct ConfigError {
    problems: Vec<Problem>,
}

/// One mistake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The file it is in: the configuration, or a policy it names.
    pub file: PathBuf,
    /// Line and column, counted from 1; `None` when the whole file is meant.
    pub position: Option<(u64, u64)>,
    /// The path of the field, like `pools[0].backends[1].url`; empty for the whole file.
    pub field: String,
    /// What is wrong.
    pub message: String,
    /// What to write instead; empty where the message already says it.
    pub hint: String,
}

impl ConfigError {
    /// `None` when there are no problems.
    pub(super) fn from_problems(mut problems: Vec<Problem>) -> Option<Self> {
        problems.sort_by(|a, b| (&a.file, a.position).cmp(&(&b.file, b.position)));
        (!problems.is_empty()).then_some(ConfigError { problems })
    }

    /// A single problem with a whole file.
    pub(crate) fn of_file(file: &Path, message: String, hint: String) -> Self {
        ConfigError { problems: vec![Problem { file: file.to_owned(), position: None, field: String::new(), message, hint }] }
    }

    /// The problems, in the order of the files.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }
}

impl From<Problem> for ConfigError {
    fn from(problem: Problem) -> Self {
        ConfigError { problems: vec![problem] }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.problems.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            problem.fmt(f)?;
        }
        Ok(())
    }
}

/// `file:line:column: field: message`, and the hint on a line of its own: editors jump to the first part.
impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        if let Some((line, column)) = self.position {
            write!(f, ":{line}:{column}")?;
        }
        f.write_str(": ")?;
        if !self.field.is_empty() {
            write!(f, "{}: ", self.field)?;
        }
        f.write_str(&self.message)?;
        if !self.hint.is_empty() {
            write!(f, "\n  hint: {}", self.hint)?;
        }
        Ok(())
    }
}
