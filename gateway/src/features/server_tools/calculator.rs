//! Arithmetic, evaluated by the template engine's expressions with everything removed except numbers and operators.

use minijinja::Environment;

/// The maximum length of an expression.
const BYTES_MAX: usize = 1000;
/// The maximum work for one expression, in the engine's unit.
const FUEL: u64 = 10_000;

#[derive(Debug, thiserror::Error)]
pub enum CalculatorError {
    #[error("an expression has at most {BYTES_MAX} characters")]
    Length,
    #[error("`{0}` is no part of arithmetic: there are numbers, + - * / // % **, and parentheses")]
    Symbol(char),
    #[error("`{0}` cannot be calculated: {1}")]
    Wrong(String, String),
}

/// Evaluates an expression, and writes its value as text.
pub fn evaluate(expression: &str) -> Result<String, CalculatorError> {
    if expression.len() > BYTES_MAX {
        return Err(CalculatorError::Length);
    }
    if let Some(symbol) =
        expression.chars().find(|c| !matches!(c, '0'..='9' | '.' | 'e' | 'E' | '+' | '-' | '*' | '/' | '%' | '(' | ')' | ' '))
    {
        return Err(CalculatorError::Symbol(symbol));
    }
    let wrong = |reason: String| CalculatorError::Wrong(expression.to_owned(), reason);
    let mut environment = Environment::empty();
    environment.set_fuel(Some(FUEL));
    let compiled = environment.compile_expression(expression).map_err(|error| wrong(error.to_string()))?;
    let value = compiled.eval(()).map_err(|error| wrong(error.to_string()))?;
    match f64::try_from(value.clone()) {
        Ok(number) if number.is_finite() => Ok(value.to_string()),
        Ok(_) => Err(wrong("the result is not finite".into())),
        Err(_) => Err(wrong("it is not one number".into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_is_done_and_nothing_else() {
        for (expression, value) in [
            ("6 * 7", "42"),
            ("(1 + 2) * 3 - 4", "5"),
            ("7 // 2", "3"),
            ("7 % 4", "3"),
            ("2 ** 10", "1024"),
            ("-3 + 1", "-2"),
            ("1.5 * 2", "3.0"),
            ("7 / 2", "3.5"),
        ] {
            assert_eq!(evaluate(expression).unwrap(), value, "{expression}");
        }
        for wrong in ["", "1 / 0", "6 *", "(1", "e", "1 2", "range(9)", "'a' * 9", "x", "9 ** 9 ** 9 ** 9", "[1]", &"1+".repeat(600)] {
            assert!(evaluate(wrong).is_err(), "{wrong}: {:?}", evaluate(wrong));
        }
    }
}
