"""Images inside SGLang's processes: requests to prepared prompts, prepared prompts to rows, and the seams for both."""
