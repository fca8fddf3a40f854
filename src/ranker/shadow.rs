//! A second ranker that is watched and never obeyed: both score the same prompts, and the lengths of the answers say which of them orders better.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;

use super::{Opinion, PromptText, Ranker, RankerError};
use crate::config::RankerSettings;
use crate::scheduler::{RankerVersion, Score, Scored, Tokens, tau_b};

/// How long a prompt may wait for its second score. Nobody waits for it.
const DEADLINE: Duration = Duration::from_secs(60);
/// Recent answers of one model that are compared.
const ANSWERS: usize = 2000;
/// Models that are compared; later ones are not, so that clients cannot make it grow.
const MODELS: usize = 64;

/// The second ranker and how it compares with the one that serves.
pub struct Shadow {
    ranker: Ranker,
    seen: Mutex<Seen>,
}

/// What the ranker that serves and its shadow said of a prompt, and how long the answer was.
type Row = (Score, Score, Tokens);

/// Answers whose prompts both rankers have scored.
#[derive(Default)]
struct Seen {
    /// Of the ranker that serves and of the shadow. Scores of others are not comparable, so a change of either begins anew.
    versions: Option<(RankerVersion, RankerVersion)>,
    /// By pool and model, oldest first.
    answers: BTreeMap<(String, String), VecDeque<Row>>,
}

/// A prompt that the shadow has been asked about. Dropped without a word, it is not compared.
#[derive(Debug)]
pub struct Pending(oneshot::Sender<Answer>);

/// What became of the prompt.
#[derive(Clone, Debug)]
struct Answer {
    pool: String,
    model: String,
    /// What the ranker that serves said of it.
    serving: Scored,
    output: Tokens,
}

impl Pending {
    /// Its answer ended by itself after this many output tokens; `serving` is what the ranker that serves said of the prompt.
    pub fn answered(self, pool: &str, model: &str, serving: Scored, output: Tokens) {
        // Nobody listens where the shadow had no score.
        _ = self.0.send(Answer { pool: pool.to_owned(), model: model.to_owned(), serving, output });
    }
}

/// How both rankers order the answers of one model.
#[derive(Clone, Debug, PartialEq)]
pub struct Compared {
    pub pool: String,
    pub model: String,
    /// Recent answers to prompts that both have scored.
    pub answers: usize,
    /// Kendall's tau-b of scores and lengths of the ranker that serves; `None` where one of them never varies.
    pub serving: Option<f64>,
    /// The same of the shadow.
    pub shadow: Option<f64>,
}

impl Shadow {
    /// Loads and verifies the directory that `settings.shadow` names, on the device of the ranker that serves, with one thread. Blocks.
    ///
    /// # Errors
    /// As for [`Ranker::start`].
    pub fn start(settings: &RankerSettings, directory: &Path) -> Result<Shadow, RankerError> {
        let settings = RankerSettings { weights: directory.to_owned(), device: settings.device, deadline: Some(DEADLINE), threads: 1, shadow: None };
        Ok(Shadow { ranker: Ranker::start(settings)?, seen: Mutex::default() })
    }

    /// As [`Ranker::follow`].
    ///
    /// # Errors
    /// As for [`Ranker::reload`].
    pub fn follow(&self, directory: &Path) -> Result<bool, RankerError> {
        self.ranker.follow(directory)
    }

    /// Whose scores are watched.
    pub fn version(&self) -> Option<RankerVersion> {
        self.ranker.version()
    }

    /// Has this text scored beside the request, which does not wait. Needs a tokio runtime.
    pub fn ask(self: &Arc<Self>, text: PromptText) -> Pending {
        let (tell, told) = oneshot::channel();
        let shadow = Arc::clone(self);
        tokio::spawn(async move {
            if let Opinion::Scored(scored) = shadow.ranker.score(text).await
                && let Ok(answer) = told.await
            {
                shadow.note(answer, scored);
            }
        });
        Pending(tell)
    }

    fn note(&self, answer: Answer, shadow: Scored) {
        let Answer { pool, model, serving, output } = answer;
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let versions = Some((serving.version, shadow.version));
        if seen.versions != versions {
            *seen = Seen { versions, ..Seen::default() };
        }
        let key = (pool, model);
        if !seen.answers.contains_key(&key) && seen.answers.len() >= MODELS {
            return;
        }
        let answers = seen.answers.entry(key).or_default();
        if answers.len() >= ANSWERS {
            answers.pop_front();
        }
        answers.push_back((serving.score, shadow.score, output));
    }

    /// What the answers say so far, by pool and model.
    pub fn compared(&self) -> Vec<Compared> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let each = seen.answers.iter();
        each.map(|((pool, model), answers)| {
            let tau = |score: fn(&Row) -> Score| tau_b(&mut answers.iter().map(|answer| (score(answer), answer.2)).collect::<Vec<_>>());
            Compared {
                pool: pool.clone(),
                model: model.clone(),
                answers: answers.len(),
                serving: tau(|answer| answer.0),
                shadow: tau(|answer| answer.1),
            }
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::weights::tests::tiny_directory;
    use super::*;
    use crate::config::Device;

    fn scored(score: f32, version: u32) -> Scored {
        Scored { score: Score::new(score).unwrap(), version: RankerVersion(version) }
    }

    fn shadow(directory: &Path) -> Shadow {
        let settings = RankerSettings { weights: directory.to_owned(), device: Device::Cpu, deadline: None, threads: 1, shadow: None };
        Shadow::start(&settings, directory).unwrap()
    }

    fn answer(model: &str, serving: Scored, output: Tokens) -> Answer {
        Answer { pool: "chat".into(), model: model.into(), serving, output }
    }

    #[test]
    fn the_lengths_say_who_orders_better() {
        let directory = tiny_directory(1);
        let shadow = shadow(directory.path());
        for n in 0..2500u32 {
            // The one that serves says the opposite, the shadow the truth.
            shadow.note(answer("llama", scored(-(n as f32), 1), 10 + n), scored(n as f32, 2));
        }
        shadow.note(answer("qwen", scored(1.0, 1), 5), scored(1.0, 2));
        let expected = [("llama", ANSWERS, Some(-1.0), Some(1.0)), ("qwen", 1, None, None)];
        let compared = shadow.compared();
        let shown: Vec<_> = compared.iter().map(|of| (of.model.as_str(), of.answers, of.serving, of.shadow)).collect();
        assert_eq!(shown, expected);

        shadow.note(answer("llama", scored(1.0, 1), 5), scored(1.0, 3));
        assert_eq!(shadow.compared().iter().map(|of| of.answers).collect::<Vec<_>>(), [1], "other weights begin anew");
        for n in 0..100 {
            shadow.note(answer(&format!("model {n}"), scored(1.0, 1), 5), scored(1.0, 3));
        }
        assert_eq!(shadow.compared().len(), MODELS);
    }

    #[tokio::test]
    async fn it_scores_with_its_own_weights_and_hears_of_the_answer() {
        let (first, second) = (tiny_directory(2), tiny_directory(3));
        let shadow = Arc::new(shadow(first.path()));
        let text = || PromptText { system: String::new(), user: "hello".into() };
        drop(shadow.ask(text()));
        shadow.ask(text()).answered("chat", "llama", scored(1.0, 1), 7);
        let compared = tokio::time::timeout(Duration::from_secs(20), async {
            while shadow.compared().is_empty() {
                tokio::task::yield_now().await;
            }
        });
        compared.await.unwrap();
        assert_eq!(shadow.compared()[0].answers, 1);
        assert!(!shadow.follow(first.path()).unwrap());
        assert!(shadow.follow(second.path()).unwrap());
    }
}
